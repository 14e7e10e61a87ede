"""Train a byte-level BPE tokenizer on the training documents of a source.

    python data/train_tokenizer.py --source python-stdlib --vocab-size 4096 --out data/code/bpe
    python data/train_tokenizer.py --source books --chat-template own.jinja --out data/books/bpe

Writes a tokenizer.json of Hugging Face with its settings, which data/prepare.py --tokenizer OUT and
transformers open. The same source and flags give the same bytes. Documents that data/prepare.py
takes for validation are left out, so that their loss is that of unseen text.
"""

import dataclasses
import itertools
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# A script has its own folder on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import readers, sources
from data.chat import end_of_answer
from data.hf_tokenizer import MODEL_SETTINGS, SETTINGS, TABLE, Special
from data.progress import progress
from data.settings import Prepare, SourceFlags, in_validation
from data.tokenizer import END_OF_TEXT
from runtime import cli, storage
from utils import ConfigError, setting

BYTES = 256
# cl100k_base's pattern of GPT-4 as Qwen2's tokenizer.json has it: each digit is a token, so that
# numbers need few entries of a small vocabulary.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
)


@dataclass(frozen=True, kw_only=True)
class TrainTokenizer(SourceFlags):
    """Train a byte-level BPE tokenizer."""

    out: Path  # new folder for tokenizer.json and its settings
    vocab_size: int = 32768  # ids: special tokens, 256 bytes and merges
    chat_template: str = "chatml"  # chatml, none, or a file with a template for jinja2
    # besides <|endoftext|> and what the template has between <| and |>
    special_tokens: tuple[str, ...] = ()
    max_documents: int = setting(0, at_least=0)  # read this many; 0: no limit
    max_bytes: int = 1_000_000_000  # stop after the text that reaches this many


def main(arguments: list[str] | None = None) -> None:
    flags = cli.parse_flags(TrainTokenizer, arguments, separator="-")
    check_out(flags.out)
    template = read_template(flags.chat_template)
    names = re.findall(r"<\|[^|<>\s]+\|>", template or "")
    specials = [*dict.fromkeys([END_OF_TEXT, *names, *flags.special_tokens])]
    if flags.vocab_size < (least := BYTES + len(specials)):
        raise ConfigError(
            f"--vocab-size {flags.vocab_size} is less than {BYTES} bytes and {len(specials)} "
            f"special tokens. Use at least {least}."
        )
    ids = {name: number for number, name in enumerate(specials)}
    ends = [ids[END_OF_TEXT]]
    named = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    if template:
        special = Special(ids, named, None, adds_bos=False, chat_template=template, ends=[])
        ends += end_of_answer(special)[0]
    table = train(flags, specials)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "pad_token": END_OF_TEXT,
    }
    settings |= named | ({"chat_template": template} if template else {})
    write(flags.out, table, settings, [*dict.fromkeys(ends)])
    print(f"{flags.out}: {table.get_vocab_size():,} ids, of which {len(specials)} are special")


def check_out(out: Path) -> None:
    if storage.is_remote(out) or out.as_posix().startswith("gs:/"):
        raise ConfigError(
            f"--out {out} is not a folder on a disk. Use one, as data/books/tokenizer."
        )
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"--out {out} exists, and nothing is overwritten. Give a new folder.")


def read_template(name: str) -> str | None:
    """Return the template of --chat-template. Raises ConfigError for an unreadable file."""
    if name in ("chatml", "none"):
        return CHATML if name == "chatml" else None
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {name} cannot be read ({error}). Use chatml, none, or a file with a "
            "template for jinja2, such as the chat_template of a tokenizer_config.json."
        ) from None


def train(flags: TrainTokenizer, specials: list[str]) -> Tokenizer:
    """Count the pairs of tokens in the source, and merge the most frequent ones."""
    table = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    table.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    table.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=flags.vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(name, normalized=False) for name in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    table.train_from_iterator(texts(flags), trainer)
    return table


def texts(flags: TrainTokenizer) -> Iterator[str]:
    """Yield the text of the training documents up to the limits, with a progress bar.

    Raises  ConfigError for a source without any.
    """
    of_source = {f.name: getattr(flags, f.name) for f in dataclasses.fields(SourceFlags)}
    config, left_out = Prepare(**of_source, out=str(flags.out)), Counter()
    parts = [*itertools.chain(*sources.open_source(config).splits)]
    read = (d for part in parts for d in readers.documents(part, config, left_out=left_out))
    kept = (d for d in read if not in_validation(d.name, d.position, flags.val_share))
    documents, done = 0, 0
    with progress(min(flags.max_bytes, sum(part.size for part in parts))) as bar:
        for document in itertools.islice(kept, flags.max_documents or None):
            documents += 1
            for chunk in document.chunks:
                if done < flags.max_bytes and chunk.text:
                    yield chunk.text
                    done += (size := len(chunk.text.encode(errors="replace")))
                    bar.update(size)
            if done >= flags.max_bytes:
                break
    if not done:
        raise ConfigError(
            f"--source {flags.source} has no text for training. Use another, or --val-share 0."
        )
    print(f"read {documents:,} documents with {done:,} bytes; merging", flush=True)


def write(out: Path, table: Tokenizer, settings: dict[str, object], ends: list[int]) -> None:
    """Write the folder under another name, and rename it once it is complete."""
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    table.save(str(part / TABLE))
    # The name by which transformers and data/hf_tokenizer.py find the ends of generated text.
    for name, content in ((SETTINGS, settings), (MODEL_SETTINGS[0], {"eos_token_id": ends})):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (part / name).write_text(text, encoding="utf-8")
    part.rename(out)


if __name__ == "__main__":
    from runtime.errors import run_command

    run_command(main)
