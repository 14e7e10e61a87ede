import convert_memory
from conftest import ROOT


def test_export_takes_little_memory():
    found = convert_memory.measured(ROOT / "configs" / "dense_124m.toml")
    assert found["parameters"] > 100e6 and found["MiB written"] > 400
    assert found["MiB"] * 2**20 <= 600e6
