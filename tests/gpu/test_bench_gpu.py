"""`python -m moelora.bench` on a small layer: every figure is there and the memory limit is kept."""

import json

import pytest

from moelora.bench import __main__ as bench
from moelora.bench.shapes import BenchShape
from moelora.testing import Shape

LAYERS = {
    "small": BenchShape("small", Shape(512, 256, 16, 4), 16, "all experts local"),
    "slice": BenchShape("slice", Shape(512, 256, 16, 4), 64, "a quarter local"),
}


@pytest.mark.parametrize("shape", LAYERS)
def test_every_system_is_right_and_its_memory_is_bounded(device, shape, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "BENCH_SHAPES", LAYERS)
    file = tmp_path / "results.json"
    systems = ["auto", "single", "two", "grouped_mm"]
    status = bench.main([
        "--shapes", shape, "--tokens", "3", "6000", "--adapters", "0", "2x16m", "--systems", *systems,
        "--replays", "3", "--workspace-limit", "80", "--json", str(file),
    ])  # fmt: skip
    assert status == 0, capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    assert len(results) == 4
    for result in results:
        assert set(result["us"]) == set(result["peak_bytes"]) == set(systems)
        assert all(0 < result["peak_bytes"][system] <= (80 << 20) + 1024 for system in systems[:3])
    assert capsys.readouterr().out.count("MiB") == 1


@pytest.mark.parametrize("pace", ["burst", "sustained"])
def test_a_pace_is_timed_beside_a_matmul_of_the_same_pace(device, pace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "BENCH_SHAPES", LAYERS)
    file = tmp_path / "results.json"
    arguments = ["--shapes", "small", "--tokens", "300", "--adapters", "0", "--systems", "auto", "--replays", "5"]
    assert bench.main([*arguments, "--pace", pace, "--json", str(file)]) == 0, capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["pace"] == pace and record["matmul_tflops"] > 1
    assert f"matmul of 8192^3, {pace}: " in capsys.readouterr().out
