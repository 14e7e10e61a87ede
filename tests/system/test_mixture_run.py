from runtime import cli, jsonl
from tiny_run import start


def test_a_run_of_a_mixture_records_each_dataset(data, runs):
    out = data[1].rpartition("/")[0]
    mixed = ["--data.mixture", f"one 0.75 {out}", f"two 0.25 {out}"]
    start(mixed, runs, "mixed")
    records = jsonl.read(runs / "mixed" / "metrics.jsonl")
    config = cli.load(runs / "mixed" / "config.toml")
    assert config.data.mixture == tuple(mixed[1:])
    for record in (r for r in records if "loss/train" in r):
        used = [record[f"data/{name}/sequences"] for name in ("one", "two")]
        assert sum(used) == record["step"] * config.train.global_batch_size
        assert abs(used[0] - 0.75 * sum(used)) < 1
    evaluations = [r for r in records if "loss/val" in r]
    assert evaluations and all(r["loss/val/one"] == r["loss/val/two"] for r in evaluations)
