"""Train a byte-level BPE tokenizer on the training documents of a source.

    python data/train_tokenizer.py --source python-stdlib --vocab-size 4096 --out data/code/bpe

data/prepare.py --tokenizer OUT and transformers open the result, of which tokenizer.json is written
last. The same source and flags give the same bytes. Documents for validation are left out, so that
their loss is that of unseen text.
"""

import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# A script has its own folder on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import readers, sources
from data.chat import end_of_answer
from data.hf_tokenizer import MODEL_SETTINGS, SETTINGS, TABLE
from data.progress import progress
from data.settings import Prepare, SourceFlags, in_validation
from data.tokenizer import END_OF_TEXT, NO_SPECIAL
from runtime import cli, errors, storage
from utils import ConfigError, setting

# Of Qwen2's tokenizer.json: the pattern of GPT-4 (cl100k_base of tiktoken), but each digit is a
# token, so that numbers take few ids of a small vocabulary.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
)
TEMPLATES = {"chatml": CHATML, "none": ""}


@dataclass(frozen=True, kw_only=True)
class TrainTokenizer(SourceFlags):
    """Train a byte-level BPE tokenizer."""

    out: str  # folder for tokenizer.json and its settings
    vocab_size: int = 32768  # ids: special tokens, 256 bytes and merges
    chat_template: str = "chatml"  # chatml, none, or a file with a template for jinja2
    # besides <|endoftext|> and what is between <| and |> in the template
    special_tokens: tuple[str, ...] = ()
    max_documents: int = setting(0, at_least=0)  # stop after so many; 0: no limit
    max_bytes: int = 1_000_000_000  # stop after the text that reaches this many


def main(arguments: list[str] | None = None) -> None:
    flags = cli.parse_flags(TrainTokenizer, arguments, separator="-")
    folder, template = storage.DiskFolder(flags.out), read_template(flags.chat_template)
    if storage.is_remote(flags.out) or folder.exists(TABLE):
        raise ConfigError(f"--out {flags.out} has a {TABLE}, or is in a bucket. Use a new folder.")
    found = re.findall(r"<\|[^|<>\s]+\|>", template)
    names = dict.fromkeys([END_OF_TEXT, *found, *flags.special_tokens])
    ids = {name: number for number, name in enumerate(names)}
    if flags.vocab_size < (least := 256 + len(ids)):
        raise ConfigError(
            f"--vocab-size {flags.vocab_size} is too small for 256 bytes and {len(ids)} special "
            f"tokens. Use at least {least}, such as 4096."
        )
    roles = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    settings = roles | {"tokenizer_class": "PreTrainedTokenizerFast"}
    ends = [ids[END_OF_TEXT]]
    if template:
        settings["chat_template"] = template
        ends += end_of_answer(NO_SPECIAL._replace(ids=ids, names=roles, chat_template=template))[0]
    try:
        folder.write(SETTINGS, json.dumps(settings, indent=2).encode())
        folder.write(MODEL_SETTINGS[0], json.dumps({"eos_token_id": ends}).encode())
    except OSError as error:
        raise ConfigError(f"--out cannot be written: {error}. Use another folder.") from None
    table = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    table.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    table.decoder = decoders.ByteLevel()
    sizes = {"vocab_size": flags.vocab_size, "min_frequency": 2, "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=[*ids], initial_alphabet=alphabet, **sizes)
    table.train_from_iterator(texts(flags), trainer)
    if (size := table.get_vocab_size()) == least < flags.vocab_size:
        raise ConfigError(f"--source {flags.source} has no text for training. Use another.")
    folder.write(TABLE, table.to_str(pretty=True).encode())
    print(f"{flags.out}: {size:,} ids, of which {len(ids)} are special")


def read_template(name: str) -> str:
    """Return the text of --chat-template, empty for none. Raises ConfigError if it has none."""
    try:
        return TEMPLATES[name] if name in TEMPLATES else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = " or ".join(TEMPLATES)
        raise ConfigError(f"--chat-template: {error}. Use {known}, or a file.") from None


def texts(flags: TrainTokenizer) -> Iterator[str]:
    """Yield the text of the training documents up to the limits, with a progress bar."""
    own = {f.name: getattr(flags, f.name) for f in fields(SourceFlags)}
    config, left_out, done = Prepare(**own, out=flags.out), Counter(), 0
    parts = [*itertools.chain(*sources.open_source(config).splits)]
    found = (d for part in parts for d in readers.documents(part, config, left_out=left_out))
    kept = (d for d in found if not in_validation(d.name, d.position, flags.val_share))
    kept = itertools.islice(kept, flags.max_documents or None)
    with progress(min(flags.max_bytes, sum(part.size for part in parts))) as bar:
        for chunk in itertools.chain.from_iterable(document.chunks for document in kept):
            yield chunk.text
            size = len(chunk.text.encode(errors="replace"))
            bar.update(size)
            if (done := done + size) >= flags.max_bytes:
                return


if __name__ == "__main__":
    errors.run_command(main)
