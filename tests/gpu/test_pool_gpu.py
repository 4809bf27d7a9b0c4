"""AdapterPool on the GPU: every test of the CPU, and streams, CUDA graphs and memory."""

import gc
import random
import threading

import pytest
import torch
from pool_cases import *  # noqa: F403
from pool_cases import check_batch, eager_forward, hammer
from pool_makers import (
    STACKS,
    Library,
    bits,
    make_adapter,
    make_adapters,
    make_layer,
    make_pool,
    random_names,
    run,
    same_bits,
)

from moelora.pool import UnknownAdapterError
from moelora.pool import storage as pool_storage

MODES = ["single", "two", "auto"]
LONG = 200_000_000  # cycles: about a tenth of a second


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


class Replays:
    """A captured forward through one layer of a pool, on a stream of its own, and what it must give."""

    def __init__(self, pool, library, dtype, index=0, tokens=12, mode="auto", seed=0):
        self.pool, self.library, self.index, self.mode = pool, library, index, mode
        self.stream, self.tokens = torch.cuda.Stream(), tokens
        self.layer = make_layer("cuda", dtype, tokens=tokens, seed=seed)
        self.ids = torch.full((tokens,), -1, dtype=torch.int32, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.out = run(self.layer, pool.layers[index], self.ids, stream_mode=mode)

    def submit(self, names, sleep=0):
        """One replay behind `sleep` cycles; the copy of its output, and the slots it used. Waits for nothing."""
        with torch.cuda.stream(self.stream), self.pool.use(names) as ids:
            slots = {name: self.pool.slot(name) for name in names if name is not None}
            if sleep:
                torch.cuda._sleep(sleep)
            self.ids.copy_(ids)
            self.graph.replay()
            return self.out.clone(), slots

    def check(self, names, got, slots):
        with torch.cuda.stream(self.stream):
            ids = torch.tensor([-1 if name is None else slots[name] for name in names], device="cuda")
            lora = self.library.lora(self.index, self.pool.num_slots, slots)
            expected = run(self.layer, lora, ids, stream_mode=self.mode)
            assert torch.equal(got, expected), f"{self.mode}, layer {self.index}, {names}, {slots}"

    def __call__(self, names, sleep=0):
        self.check(names, *self.submit(names, sleep))


def load(pool, library, name):
    return pool.load(name, library.adapters[name])


# ---- graphs ----


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_serves_whatever_is_loaded(device, dtype, mode):
    """K14, G06: captured with an empty pool; loads, evictions and replacements between replays"""
    pool, library = make_pool(device, dtype, num_slots=2), Library(device, make_adapters(4, dtype))
    replays = [Replays(pool, library, dtype, index, mode=mode) for index in range(2)]
    a, b, c, _ = library.names

    def check(names):
        for replay in replays:
            replay(names * 4)

    check([None] * 3)
    load(pool, library, a)
    check([a, None, a])
    load(pool, library, b)
    check([b, None, a])
    pool.evict(a)
    check([b, None, b])
    for replay in replays:  # ids of the freed slot, from before
        replay.ids.fill_(0)
        torch.cuda.synchronize()
        replay.graph.replay()
        replay.check([None] * 12, replay.out, {})
    assert load(pool, library, c) == 0
    check([c, None, b])
    pool.load(b, library.adapters[a])
    library.adapters[b], kept = library.adapters[a], library.adapters[b]
    check_batch(pool, replays[0].layer, [b, None, c] * 4, library.adapters)
    library.adapters[b] = kept
    load(pool, library, b)
    check([b, c, None])


@pytest.mark.parametrize("change", ["load", "replace", "evict"])
@pytest.mark.parametrize("leave_on_another_stream", [False, True])
def test_changes_wait_for_work_in_flight(device, dtype, change, leave_on_another_stream):
    """The slot is needed by a replay that has not even started when it is to change."""
    pool, library = make_pool(device, dtype, num_slots=1), Library(device, make_adapters(3, dtype))
    replay, other = Replays(pool, library, dtype), Replays(pool, library, dtype, mode="single")
    a, b, _ = library.names
    names, other_names = [a, None, a] * 4, [b, None, b] * 4
    for _ in range(3):
        load(pool, library, a)
        if leave_on_another_stream:
            # The slots are taken on one stream, the work is on another, which is current at the end.
            with torch.cuda.stream(torch.cuda.Stream()):
                pool.pin(a)
            replay.ids.copy_(torch.tensor([0, -1, 0] * 4))
            torch.cuda.synchronize()
            with torch.cuda.stream(replay.stream):
                torch.cuda._sleep(LONG)
                replay.graph.replay()
                got, slots = replay.out.clone(), {a: 0}
                pool.unpin(a)
        else:
            got, slots = replay.submit(names, sleep=LONG)
        assert not replay.stream.query(), "the test is worth nothing where the replay is done already"
        if change == "load":
            load(pool, library, b)
        elif change == "replace":
            pool.load(a, library.adapters[b])
        else:
            pool.evict(a)
        replay.check(names, got, slots)
        if change == "load":
            other(other_names)


def test_a_change_waits_for_the_stream_that_asked_last(device, dtype):
    """Without pins, in one thread: the stream that was current in adapter_ids"""
    pool, library = make_pool(device, dtype, num_slots=1), Library(device, make_adapters(2, dtype))
    layer = make_layer(device, dtype)
    a, b = library.names
    load(pool, library, a)
    stream, names = torch.cuda.Stream(), [a, None, a] * 4
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        ids = pool.adapter_ids(names)
        torch.cuda._sleep(LONG)
        got = run(layer, pool.layers[0], ids)
    assert not stream.query()
    load(pool, library, b)
    expected = run(layer, library.lora(0, 1, {a: 0}), torch.tensor([0, -1, 0] * 4, device=device))
    assert torch.equal(got, expected)


def test_replays_go_on_while_a_slot_is_written(device, dtype, monkeypatch):
    """Replays that were submitted after a load began do not wait for it."""
    pool, library = make_pool(device, dtype, num_slots=2), Library(device, make_adapters(3, dtype))
    replay = Replays(pool, library, dtype)
    a, b, c = library.names
    load(pool, library, a)
    load(pool, library, b)
    pool.pin(a)
    place, reached, go_on = pool_storage.place, threading.Semaphore(0), threading.Event()

    def slow(adapter, slot):
        place(adapter, slot)
        reached.release()
        assert go_on.wait(60)

    monkeypatch.setattr(pool_storage, "place", slow)
    loader = threading.Thread(target=load, args=(pool, library, c))
    loader.start()
    try:
        assert reached.acquire(timeout=60)
        for _ in range(100):
            replay([a, None, a] * 4)
    finally:
        go_on.set()
        loader.join()
    replay([a, c, None] * 4)


def test_every_stream_can_use_a_new_pool(device, dtype):
    """Its memory is reused, and the stream it is made on is busy."""
    layer = make_layer(device, dtype)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        garbage = make_pool(device, dtype)
        for lora in garbage.layers:
            for name in STACKS:
                getattr(lora, name).fill_(7)
        del garbage, lora
        torch.cuda._sleep(LONG)
        pool = make_pool(device, dtype)
    slots = torch.tensor([0, 1, 2, -1] * 3, dtype=torch.int32, device=device)
    results = [run(layer, lora, slots, stream_mode="single") for lora in pool.layers]
    base = run(layer, stream_mode="single")
    assert all(torch.equal(result, base) for result in results)


def test_every_stream_sees_a_load_that_returned(device, dtype):
    pool, library = make_pool(device, dtype, num_slots=1), Library(device, make_adapters(4, dtype))
    replays = [Replays(pool, library, dtype, tokens=tokens, mode=mode) for tokens in (1, 40) for mode in MODES]
    choose = random.Random(3)
    for _ in range(100):
        name = choose.choice(library.names)
        load(pool, library, name)
        replay = choose.choice(replays)
        replay([name] * replay.tokens)


def test_in_place_updates_beside_replays(device, dtype):
    """K14: the caller writes slot 1 on a stream of its own while slot 0 is replayed; replays that wait see it all"""
    pool, library = make_pool(device, dtype, num_slots=2), Library(device, make_adapters(4, dtype))
    replay = Replays(pool, library, dtype)
    a, b, c, _ = library.names
    load(pool, library, a)
    load(pool, library, b)
    new = library.lora(0, 2, {c: 1})
    replay([a, None, b] * 4)  # loads every kernel, which may wait for the device
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5 * LONG)
        for name in STACKS:
            getattr(pool.layers[0], name)[1].copy_(getattr(new, name)[1])
    for _ in range(20):
        replay([a, None, a] * 4)
    assert not stream.query()
    replay.stream.wait_stream(stream)
    names = [a, None, b] * 4
    got, slots = replay.submit(names)
    replay.check([c if name == b else name for name in names], got, {a: slots[a], c: slots[b]})


# ---- captures ----


def test_slots_do_not_change_in_a_capture(device, dtype):
    """Refused before anything happens, by the capturing thread and by others, and the capture goes on."""
    pool, layer = make_pool(device, dtype, num_slots=1), make_layer(device, dtype)
    pool.load("a", make_adapter(1, dtype))
    ids, before = pool.adapter_ids(["a", None, "a"] * 4), bits(pool)
    expected = run(layer, pool.layers[0], ids)
    adapter, stream, errors = make_adapter(2, dtype), torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        pool.slot("a")
    torch.cuda.synchronize()

    def attempt():
        for action in (lambda: pool.load("b", adapter), lambda: pool.evict("a")):
            try:
                action()
            except RuntimeError as error:
                errors.append(str(error))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        attempt()
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="adapter_ids cannot be captured"):
            pool.adapter_ids(["a"])
        with pytest.raises(RuntimeError, match="adapter_ids cannot be captured"), pool.use(["a"]):
            pass
        out = run(layer, pool.layers[0], ids)
    assert errors == ["slots cannot change while a stream that uses the pool is being captured"] * 4
    assert pool.loaded() == {"a": 0}
    assert same_bits(bits(pool), before)
    graph.replay()
    assert torch.equal(out, expected)
    pool.load("b", adapter)
    check_batch(pool, layer, ["b", None, "b"] * 4, {"b": adapter})


# ---- memory, devices ----


def test_loads_and_evictions_take_no_device_memory(device, dtype):
    pool, library = make_pool(device, dtype, num_slots=2), Library(device, make_adapters(5, dtype))
    choose = random.Random(5)
    load(pool, library, library.names[0])
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(50):
        load(pool, library, choose.choice(library.names))
        if choose.random() < 0.3:
            pool.evict(next(iter(pool.loaded())))
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before


def test_a_pool_that_does_not_fit_says_so(device, dtype):
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        make_pool(device, dtype, num_slots=100_000_000)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_pool_on_another_device_than_the_current(device, dtype):
    """G10"""
    pool, layer = make_pool("cuda:1", dtype, num_slots=1), make_layer("cuda:1", dtype)
    for seed in range(3):
        adapter = make_adapter(seed, dtype)
        pool.load(f"adapter {seed}", adapter)
        names = [f"adapter {seed}", None] * 6
        assert pool.adapter_ids(names).device == torch.device("cuda:1")
        check_batch(pool, layer, names, {names[0]: adapter})
    assert torch.cuda.current_device() == 0


# ---- threads ----


def on_a_stream(forward):
    """`forward` on a stream of its own, now and then behind other work, so that it is in flight when slots change."""
    stream = torch.cuda.Stream()

    def delayed(choose):
        with torch.cuda.stream(stream):
            if choose.random() < 0.3:
                torch.cuda._sleep(choose.randrange(2_000_000))
            return forward(choose)

    return delayed


def replayed_forward(replay):
    """A function for `hammer`: replays, of which several may be in flight before they are checked."""

    def forward(choose):
        submitted = []
        for _ in range(choose.randint(1, 4)):
            names = random_names(replay.library, replay.pool, choose, replay.tokens)
            try:
                submitted.append((names, *replay.submit(names, sleep=choose.randrange(2_000_000))))
            except UnknownAdapterError:
                continue
        for batch in submitted:
            replay.check(*batch)
        return bool(submitted)

    return forward


@pytest.mark.slow
def test_threads_for_a_minute(device):
    """Loads and evictions, eager forwards and replays on streams of their own, each output checked"""
    dtype = torch.bfloat16
    pool, library = make_pool(device, dtype, num_slots=4), Library(device, make_adapters(8, dtype))
    replays = [
        Replays(pool, library, dtype, index, tokens, mode, seed=tokens)
        for index, tokens, mode in [(0, 4, "two"), (1, 64, "two"), (0, 16, "auto"), (1, 300, "single")]
    ]
    eager = [eager_forward(pool, library, device, dtype, seed) for seed in range(2)]
    torch.cuda.synchronize()
    forwards = [on_a_stream(forward) for forward in eager] + [replayed_forward(replay) for replay in replays]
    counts = hammer(pool, library, forwards, seconds=60)
    print(counts)
    assert counts["loads"] > 500 and counts["evictions"] > 100 and counts["batches"] > 1000, counts
