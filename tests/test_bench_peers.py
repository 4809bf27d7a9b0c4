"""The rows of vLLM and SGLang without either: packages of their names whose layers are computed here, pair by pair,
from what was handed to them; and what is printed where a package is missing or not the one expected."""

import importlib.metadata
import importlib.util
import sys
import types
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from layer_cases import make

from moelora.bench import peers, peers_sglang, peers_vllm
from moelora.reference import moe_lora_reference
from moelora.testing import Shape, random_lora, row_errors

SHAPE = Shape(hidden=64, inter=32, experts=8, top_k=2)
TOKENS = 5
MODULES = {"vllm": peers_vllm, "sglang": peers_sglang}
LAYERS = {"vllm": peers_vllm.VllmLayer, "sglang": peers_sglang.SglangLayer}


def by_pair(x, w13, w2, topk_weights, topk_ids, expert_of, delta13, delta2):
    """out [T, H]; `expert_of` gives the local expert of an id or -1, the deltas add to one pair's row."""
    out = torch.zeros_like(x)
    for token, ids in enumerate(topk_ids.tolist()):
        for weight, expert in zip(topk_weights[token], map(expert_of, ids), strict=True):
            if expert < 0:
                continue
            gate, up = (w13[expert] @ x[token] + delta13(token, expert, x[token])).chunk(2)
            z = F.silu(gate) * up
            out[token] += weight * (w2[expert] @ z + delta2(token, expert, z))
    return out


@pytest.fixture
def packages(monkeypatch):
    """`packages(name, {module: attributes})` makes a package of that name, version 9.9."""

    def install(name, modules):
        for module, attributes in modules.items():
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                path = ".".join(parts[:end])
                if not isinstance(sys.modules.get(path), Fake):
                    monkeypatch.setitem(sys.modules, path, Fake(path))
            vars(sys.modules[module]).update(attributes)
        MODULES[name].interface.cache_clear()

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    yield install
    for module in MODULES.values():
        module.interface.cache_clear()


class Fake(types.ModuleType):
    """A module that stands for a peer's."""


class Recorder(SimpleNamespace):
    """Keeps its keyword arguments as attributes, as the peers' configuration classes do."""


class FakePunica:
    """What vLLM keeps of a step: the adapter of each token."""

    made: ClassVar[list] = []

    def __init__(self, max_num_batched_tokens, max_batches, device, *, lora_config):
        assert max_num_batched_tokens == max_batches == TOKENS and lora_config.specialize_active_lora is False
        self.max_loras, self.token_mapping_meta, self.slots = lora_config.max_loras, self, None
        FakePunica.made.append(self)

    def prepare_tensors(self, token_lora_mapping):
        assert self.slots is None, "once per step"
        self.slots = token_lora_mapping.tolist()


class FakeTritonExperts:
    """`TritonExperts`, from its context."""

    def __init__(self, moe_config, quant_config):
        assert quant_config == "unquantized" and moe_config.is_lora_enabled
        self.config = moe_config

    def set_lora_context(self, context):
        self.context = context

    @staticmethod
    def workspace_shapes(tokens, rows, hidden, top_k, num_experts, local, expert_tokens_meta, activation):
        assert (rows, hidden, activation) == (2 * SHAPE.inter, SHAPE.hidden, "silu")
        return (tokens, top_k, max(rows // 2, hidden)), (tokens, top_k, max(rows, hidden)), (tokens, hidden)

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
        a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
    ):  # fmt: skip
        lora, config = self.context, self.config
        assert (config.num_experts, config.num_local_experts) == (global_num_experts, w1.shape[0])
        assert (config.hidden_dim, config.intermediate_size) == (SHAPE.hidden, SHAPE.inter)
        assert workspace13.shape == workspace2.shape == (TOKENS, SHAPE.top_k, SHAPE.hidden)
        assert lora.adapter_enabled.tolist() == [1] * (lora.max_loras + 1) and lora.adapter_enabled.dtype == torch.int32
        assert len(lora.w13_lora_a_stacked) == len(lora.w13_lora_b_stacked) == lora.w13_num_slices
        assert lora.max_loras == lora.punica_wrapper.max_loras and lora.top_k == SHAPE.top_k
        slots = lora.punica_wrapper.slots

        def delta(a_stacks, b_stacks, token, expert, row):
            if slots[token] < 0:
                return 0
            pairs = zip(a_stacks, b_stacks, strict=True)
            return torch.cat([b[slots[token], expert] @ (a[slots[token], expert] @ row) for a, b in pairs])

        output.copy_(
            by_pair(
                hidden_states, w1, w2, topk_weights, topk_ids,
                lambda expert: expert if expert_map is None else expert_map[expert].item(),
                lambda *pair: delta(lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, *pair),
                lambda *pair: delta(lora.w2_lora_a_stacked, lora.w2_lora_b_stacked, *pair),
            )
        )  # fmt: skip


def fake_fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, *, global_num_experts, expert_map):
    assert global_num_experts >= w1.shape[0] and (expert_map is None) == (global_num_experts == w1.shape[0])
    expert_of = (lambda expert: expert) if expert_map is None else (lambda expert: expert_map[expert].item())
    nothing = lambda *pair: 0  # noqa: E731
    return by_pair(hidden_states, w1, w2, topk_weights, topk_ids, expert_of, nothing, nothing)


def install_vllm(packages, **of_fused_moe):
    fused_moe = "vllm.model_executor.layers.fused_moe"
    FakePunica.made.clear()
    parallel = SimpleNamespace(make_no_parallel=lambda: "alone")
    packages(
        "vllm",
        {
            f"{fused_moe}.fused_moe": {"fused_experts": fake_fused_experts} | of_fused_moe,
            f"{fused_moe}.config": {
                "FUSED_MOE_UNQUANTIZED_CONFIG": "unquantized", "FusedMoEConfig": Recorder,
                "FusedMoEParallelConfig": parallel, "RoutingMethodType": SimpleNamespace(Renormalize=1),
            },
            f"{fused_moe}.activation": {"MoEActivation": SimpleNamespace(SILU="silu")},
            f"{fused_moe}.experts.lora_context": {"MoELoRAContext": Recorder},
            f"{fused_moe}.experts.triton_moe": {"TritonExperts": FakeTritonExperts},
            "vllm.lora.punica_wrapper.punica_gpu": {"PunicaWrapperGPU": FakePunica},
            "vllm": {"envs": SimpleNamespace(VLLM_LORA_ENABLE_DUAL_STREAM=False, VLLM_TUNED_CONFIG_FOLDER=None)},
        },
    )  # fmt: skip


class FakeMoeRunner:
    """`MoeRunner`, from what it is handed."""

    def __init__(self, backend, config, lora_enabled=False):
        assert backend == "triton" and config.inplace is False and config.activation == "silu"
        assert (config.hidden_size, config.intermediate_size_per_partition) == (SHAPE.hidden, SHAPE.inter)
        self.config, self.lora_enabled = config, lora_enabled

    def run(self, dispatch_output, quant_info, lora_info=None):
        assert self.lora_enabled == (lora_info is not None)
        x, scale, (topk_weights, topk_ids, _) = dispatch_output
        assert scale is None and topk_ids.dtype == torch.int32
        assert self.config.num_local_experts == quant_info.w13_weight.shape[0]

        def delta(a, b, parts, token, expert, row):
            slot = -1 if lora_info is None else lora_info.token_lora_mapping[token].item()
            if slot < 0:
                return 0
            halves = zip(a[slot, expert].chunk(parts), b[slot, expert].chunk(parts), strict=True)
            return torch.cat([b_half @ (a_half @ row) for a_half, b_half in halves])

        if lora_info is not None:
            rank, slots = lora_info.max_lora_rank, lora_info.gate_up_lora_a_weights.shape[0]
            assert lora_info.lora_use_virtual_experts and lora_info.has_active_lora
            assert (
                lora_info.gate_up_lora_a_weights.shape[2] == 2 * rank
                and lora_info.token_lora_mapping.dtype == torch.int32
            )
            assert lora_info.adapter_enabled.tolist() == [1] * slots and lora_info.lora_ranks.tolist() == [rank] * slots
        gate_up = lora_info and (lora_info.gate_up_lora_a_weights, lora_info.gate_up_lora_b_weights, 2)
        down = lora_info and (lora_info.down_lora_a_weights, lora_info.down_lora_b_weights, 1)
        out = by_pair(
            x, quant_info.w13_weight, quant_info.w2_weight, topk_weights, topk_ids, lambda expert: expert,
            lambda *pair: delta(*(gate_up or (None, None, 2)), *pair),
            lambda *pair: delta(*(down or (None, None, 1)), *pair),
        )  # fmt: skip
        return SimpleNamespace(hidden_states=out)


def install_sglang(packages, published=False):
    """Returns what was published."""
    calls = []
    runtime = {
        "get_context": lambda: SimpleNamespace(is_config_namespace_published=lambda name: published),
        "get_parallel": lambda: SimpleNamespace(override_permanently=lambda **values: calls.append(values)),
        "publish": lambda server_args, *, role, ranks: calls.append((server_args.model_path, ranks.world_rank)),
        "SpawnRanks": Recorder,
    }
    moe = "sglang.srt.layers.moe"
    packages(
        "sglang",
        {
            "sglang.srt.runtime_context": runtime,
            "sglang.srt.server_args": {"ServerArgs": Recorder},
            f"{moe}.moe_runner.runner": {"MoeRunner": FakeMoeRunner},
            f"{moe}.moe_runner.base": {"MoeRunnerConfig": Recorder},
            f"{moe}.utils": {"MoeRunnerBackend": SimpleNamespace(TRITON="triton")},
            f"{moe}.moe_runner.triton": {"TritonMoeQuantInfo": Recorder},
            f"{moe}.token_dispatcher.standard": {"StandardDispatchOutput": lambda x, scale, topk: (x, scale, topk)},
            f"{moe}.topk": {"StandardTopKOutput": lambda weights, ids, logits: (weights, ids, logits)},
            "sglang.srt.lora.lora_moe_runners": {"LoRAInfo": Recorder},
        },
    )
    return calls


INSTALL = {"vllm": install_vllm, "sglang": install_sglang}


@pytest.mark.parametrize("system", LAYERS)
@pytest.mark.parametrize("adapters", [0, 1, 4])
@pytest.mark.parametrize("num_experts", [SHAPE.experts, 3 * SHAPE.experts])
@pytest.mark.parametrize("shared_a", [True, False])
def test_a_peer_gets_the_layer_as_it_is(packages, system, adapters, num_experts, shared_a):
    """Base rows among the adapters', gate and up with one A or two, all experts local or a slice of them"""
    INSTALL[system](packages)
    layer, lora, adapter_ids = make(TOKENS, "cpu", torch.float32, SHAPE, slots=max(adapters, 1), shared_a=shared_a)
    lora.scaling.fill_(1.0)
    if not adapters:
        lora = adapter_ids = None
    scores = torch.rand(TOKENS, num_experts, generator=torch.Generator().manual_seed(1))
    ids = scores.argsort(dim=1)[:, : SHAPE.top_k].int()
    if num_experts > SHAPE.experts:
        ids[0] = torch.tensor([SHAPE.experts - 1, SHAPE.experts])  # the last local expert and the first that is not
    arguments = (layer.hidden_states, layer.w13, layer.w2, layer.topk_weights, ids)
    peer = LAYERS[system](num_experts, adapter_ids, adapters)
    expected = moe_lora_reference(*arguments, lora=lora, adapter_ids=adapter_ids, num_experts=num_experts)
    for _ in range(2):  # a step has many layers: what is prepared once serves all of them
        assert row_errors(peer(*arguments, lora), expected).max() <= 1e-5


@pytest.mark.parametrize("system", LAYERS)
def test_the_layers_of_a_step_keep_their_own_adapters(packages, system):
    INSTALL[system](packages)
    layer, _, adapter_ids = make(TOKENS, "cpu", torch.float32, SHAPE, slots=2)
    loras = [random_lora(2, SHAPE, 8, dtype=torch.float32, seed=seed) for seed in (1, 2)]
    peer = LAYERS[system](SHAPE.experts, adapter_ids, 2)
    for lora in loras:
        lora.scaling.fill_(1.0)
        expected = moe_lora_reference(*layer.arguments, lora=lora, adapter_ids=adapter_ids)
        assert row_errors(peer(*layer.arguments, lora), expected).max() <= 1e-5


def test_vllm_prepares_a_step_once_and_only_with_adapters(packages):
    install_vllm(packages)
    layer, lora, adapter_ids = make(TOKENS, "cpu", torch.float32, SHAPE)
    peers_vllm.VllmLayer(SHAPE.experts)(*layer.arguments)
    assert FakePunica.made == []
    peer = peers_vllm.VllmLayer(SHAPE.experts, adapter_ids, 3)
    peer(*layer.arguments, lora)
    peer(*layer.arguments, lora)
    assert [punica.slots for punica in FakePunica.made] == [adapter_ids.tolist()]


@pytest.mark.parametrize("published", [False, True])
def test_sglang_is_configured_once_and_never_over_a_running_engine(packages, published):
    calls = install_sglang(packages, published)
    assert peers.missing("sglang") is None and peers.missing("sglang") is None
    assert calls == ([] if published else [("dummy", 0), {"tp_group": None}])


def test_a_peer_of_another_interface_is_one_line_with_its_version(packages):
    def other(*_, **__):
        raise TypeError("missing\nsecond line")

    install_vllm(packages, fused_experts=other)
    assert peers.missing("vllm") is None
    layer, _, _ = make(TOKENS, "cpu", torch.float32, SHAPE)
    with pytest.raises(peers.Refused) as caught:
        peers_vllm.VllmLayer(SHAPE.experts)(*layer.arguments)
    assert peers.one_line(caught.value) == "vllm 9.9: TypeError: missing"
    packages("sglang", {"sglang.srt.runtime_context": {}})
    reason = peers.missing("sglang")
    assert reason.startswith("sglang 9.9: AttributeError") and "get_context" in reason and "\n" not in reason


def test_a_peer_that_lacks_a_module_of_its_own_is_not_called_missing(packages):
    packages("vllm", {"vllm": {}})
    assert peers.missing("vllm").startswith("vllm 9.9: ModuleNotFoundError: No module named 'vllm.model_executor")


@pytest.mark.parametrize("system", LAYERS)
def test_a_missing_peer_is_not_installed(system):
    if importlib.util.find_spec(system) is not None:
        pytest.skip(f"{system} is installed")
    MODULES[system].interface.cache_clear()
    assert peers.missing(system) == "not installed"
    with pytest.raises(peers.Refused, match="not installed"):
        LAYERS[system](SHAPE.experts)(*make(TOKENS, "cpu", torch.float32, SHAPE)[0].arguments)
    assert peers.missing("grouped_mm") is None


def test_every_foreign_row_has_its_module():
    assert set(peers.FOREIGN) == set(LAYERS)
