"""The examples run, and the quickstart notices a mix-up."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


def load_example(name: str):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def quickstart():
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    return load_example("quickstart")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT calls a function of transformers by its old name
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cpu", "bfloat16")])
def test_quickstart_matches_transformers_and_peft(quickstart, capsys, device, dtype):
    assert quickstart.main(["--device", device, "--dtype", dtype]) == 0
    printed = capsys.readouterr().out
    assert "ok: every row matches" in printed
    assert sum(name in printed for name in ("A, rank 4", "B, rank 16", "none")) == 3


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_quickstart_on_cuda(quickstart, capsys):
    assert quickstart.main(["--device", "cuda"]) == 0
    assert "ok: every row matches" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quickstart_fails_where_one_row_uses_another_adapter(quickstart, capsys, monkeypatch, dtype):
    use_moelora = quickstart.use_moelora

    def mixed_up(model, folders, row_adapters):
        wrong = row_adapters.clone()
        wrong[2] = 0  # row 2 uses B
        use_moelora(model, folders, wrong)

    monkeypatch.setattr(quickstart, "use_moelora", mixed_up)
    assert quickstart.main(["--device", "cpu", "--dtype", dtype]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_quickstart_refuses_float32_on_cuda(quickstart, capsys):
    with pytest.raises(SystemExit) as exit_info:
        quickstart.main(["--device", "cuda", "--dtype", "float32"])
    assert exit_info.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_ops_compose_to_the_layer(device, capsys):
    assert load_example("ops_directly").main(["--device", device]) == 0
    assert "against the float64 reference" in capsys.readouterr().out


def test_ops_directly_fails_where_a_delta_is_left_out(monkeypatch, capsys):
    example = load_example("ops_directly")
    finalize = example.ops.finalize
    monkeypatch.setattr(
        example.ops, "finalize", lambda *args, **kwargs: finalize(*args, **(kwargs | {"down_lora_delta": None}))
    )
    assert example.main([]) == 1
