"""Token shards in a bucket whose requests can fail."""

import pytest

from data import verify
from data.manifest import INDEX
from runtime.storage import BucketFolder
from test_token_files import ROWS, make, opened, same

# Clients leave connections to be closed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("kind", [429, 503, "cut request", "cut response"])
def test_shards_in_a_bucket_are_read_after_failed_requests_and_verified(
    bucket, tmp_path, capsys, kind
):
    folder = make(tmp_path / "train")
    url = f"{bucket.url}/corpus/train"
    for path in folder.iterdir():
        BucketFolder(url).write(path.name, path.read_bytes())
    fault = bucket.fault(kind, on="read", path="*.npy", times=2)
    for order in ("windows", "blocks"):
        same(opened(url, order=order).rows(0, ROWS), opened(folder, order=order).rows(0, ROWS))
    assert fault.done == 2
    verify.main(["--folder", url.rpartition("/")[0]])
    assert "is complete: 10 files, " in capsys.readouterr().out
    BucketFolder(url).write("shard_001.npy", (folder / "shard_001.npy").read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"1 files are damaged"):
        verify.main(["--folder", url])
    data = opened(url).parts[""]
    BucketFolder(url).remove(["shard_001.npy", INDEX])
    with pytest.raises(ValueError, match=r"shard_001.npy is missing: .* Copy the file again"):
        data.batch(ROWS + 35)
    with pytest.raises(ValueError, match=r"index.json does not exist"):
        opened(url)
