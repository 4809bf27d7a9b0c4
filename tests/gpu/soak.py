"""Soak of streams, CUDA graphs and adapters that come and go: random work, every output checked.

    python tests/gpu/soak.py [seconds, default 600]

A thread loads and evicts adapters at random, half of them from files, while the main thread submits batches to three
streams: random T, expert ids, adapters and layer; single, two streams and auto; eager and replayed from graphs, which
are destroyed and captured anew now and then. Every output is compared with the bits of an eager call with the same
adapters in stacks that no pool made ("single" for single and two), and some with the float32 reference. At the end
neither torch nor the process may hold more memory than after the first tenth. Exit status 1: something was wrong.
"""

import gc
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pool_makers import (
    BLOCKS,
    Library,
    load_folder,
    make_adapters,
    make_pool,
    peft_config,
    peft_tensors,
    random_names,
    run,
    write_folder,
)

from moelora.pool import UnknownAdapterError
from moelora.reference import moe_lora_reference
from moelora.testing import Shape, check_close, random_layer

SHAPE = Shape(hidden=512, inter=256, experts=32, top_k=4)
TENSORS_PER_FILE = 2 * 32 * 3 * 2  # blocks, experts, projections, A and B
# safe_open(...).get_tensor of safetensors 0.5 to 0.8 never frees two Python ints (seen with nothing of ours loaded).
SAFETENSORS_LEAK_BYTES = 64
DTYPE = torch.bfloat16
MODES = ("single", "two", "auto")
GRAPH_TOKENS = (1, 4, 16, 64, 256)
MIB = 2**20


class Graph:
    """A captured forward of one layer, its static inputs, and the stream that all its replays are on."""

    def __init__(self, soak, tokens, index, mode, stream):
        self.configuration = tokens, index, mode, stream
        self.inputs = soak.make_inputs(index, tokens, seed=0)
        self.adapter_ids = torch.full((tokens,), -1, dtype=torch.int32, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=stream):
            self.out = run(self.inputs, soak.pool.layers[index], self.adapter_ids, stream_mode=mode)

    def replay(self, inputs, adapter_ids):
        self.inputs.hidden_states.copy_(inputs.hidden_states)
        self.inputs.topk_ids.copy_(inputs.topk_ids)
        self.inputs.topk_weights.copy_(inputs.topk_weights)
        self.adapter_ids.copy_(adapter_ids)
        self.graph.replay()
        return self.out.clone()


class Soak:
    def __init__(self, folder, seed=0):
        self.choose = random.Random(seed)
        self.library, self.sources = self.make_library(folder)
        self.pool = make_pool("cuda", DTYPE, num_slots=6, shape=SHAPE)
        self.weights = [random_layer(1, SHAPE, dtype=DTYPE, device="cuda", seed=index) for index in range(len(BLOCKS))]
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.counts = Counter()
        self.stop = threading.Event()
        self.changing = threading.Lock()  # held during a load, and by whoever needs that there is none
        self.failure = None
        self.tensors_from_files = 0
        self.graphs = [
            Graph(self, tokens, self.choose.randrange(len(BLOCKS)), mode, self.choose.choice(self.streams))
            for tokens in GRAPH_TOKENS
            for mode in MODES
        ]

    def make_library(self, folder):
        """16 adapters, every other one in a file."""
        adapters = make_adapters(16, DTYPE, shape=SHAPE)
        sources = dict(adapters)
        for index, name in enumerate(list(adapters)[1::2]):
            rank = 1 + 2 * index
            tensors = peft_tensors(rank, seed=index, shape=SHAPE)
            sources[name] = write_folder(folder / str(index), tensors, peft_config(rank))
            adapters[name] = load_folder(sources[name], DTYPE, shape=SHAPE)
        return Library("cuda", adapters), sources

    def make_inputs(self, index, tokens, seed):
        """Random tokens for the weights of a layer; a few pairs belong to no expert here."""
        generator = torch.Generator("cuda").manual_seed(seed)

        def uniform(*size):
            return torch.rand(size, generator=generator, device="cuda")

        x = torch.randn(tokens, SHAPE.hidden, generator=generator, device="cuda", dtype=DTYPE)
        ids = uniform(tokens, SHAPE.experts).argsort(dim=1)[:, : SHAPE.top_k].int()
        ids[uniform(tokens, SHAPE.top_k) < 0.03] = -1
        weights = 0.2 + uniform(tokens, SHAPE.top_k)
        return self.weights[index].with_(hidden_states=x, topk_ids=ids, topk_weights=weights)

    # ---- adapters ----

    def change_adapters(self):
        choose = random.Random(1)
        try:
            while not self.stop.is_set():
                name = choose.choice(self.library.names)
                with self.changing:
                    self.change_one(choose, name)
                time.sleep(choose.random() * 0.01)
        except BaseException as error:
            self.failure = error
            self.stop.set()

    def change_one(self, choose, name):
        try:
            if choose.random() < 0.75:
                self.pool.load(name, self.sources[name])
                self.counts["loads"] += 1
                self.tensors_from_files += TENSORS_PER_FILE if isinstance(self.sources[name], Path) else 0
            else:
                self.pool.evict(name)
                self.counts["evictions"] += 1
        except UnknownAdapterError:
            pass
        except RuntimeError as error:
            if "pinned" not in str(error):
                raise
            self.counts["refused changes"] += 1

    # ---- batches ----

    def submit(self):
        """One batch on one stream, not waited for; what `check` needs of it, or None where an adapter had gone."""
        choose = self.choose
        graph = choose.choice(self.graphs) if choose.random() < 0.6 else None
        if graph is None:
            tokens = choose.choice([choose.randint(1, 16), choose.randint(1, 300), choose.randint(300, 1500)])
            index, mode, stream = choose.randrange(len(BLOCKS)), choose.choice(MODES), choose.choice(self.streams)
        else:
            tokens, index, mode, stream = graph.configuration
        names = random_names(self.library, self.pool, choose, tokens)
        with torch.cuda.stream(stream):
            inputs = self.make_inputs(index, tokens, seed=choose.randrange(2**31))
            if choose.random() < 0.1:
                torch.cuda._sleep(choose.randrange(2_000_000))
            try:
                with self.pool.use(names) as ids:
                    slots = {name: self.pool.slot(name) for name in set(names) - {None}}
                    if graph is None:
                        got = run(inputs, self.pool.layers[index], ids, stream_mode=mode)
                    else:
                        got = graph.replay(inputs, ids)
            except UnknownAdapterError:
                self.counts["batches whose adapter had gone"] += 1
                return None
        self.counts["eager" if graph is None else "replayed"] += 1
        self.counts[mode] += 1
        return got, inputs, ids, slots, index, mode, stream, graph is not None

    def check(self, got, inputs, ids, slots, index, mode, stream, replayed):
        with torch.cuda.stream(stream):
            lora = self.library.lora(index, self.pool.num_slots, slots)
            expected = run(inputs, lora, ids, stream_mode="auto" if mode == "auto" else "single")
            if not torch.equal(got, expected):
                rows = (got != expected).any(dim=1).nonzero().flatten().tolist()
                raise AssertionError(
                    f"{'replayed' if replayed else 'eager'} {mode}, layer {index}, T = {len(got)}: rows {rows[:10]} "
                    f"({len(rows)} in all) differ from the eager call; slots {slots}, ids {ids.tolist()[:20]}"
                )
            if self.choose.random() < 0.05:
                arguments = {"lora": lora, "adapter_ids": ids}
                exact = moe_lora_reference(*inputs.arguments, **arguments, dtype=torch.float32)
                check_close(got, exact, plain=moe_lora_reference(*inputs.arguments, **arguments, dtype=None))
                self.counts["against the reference"] += 1

    def submit_and_check(self, count):
        """All are submitted before the first is checked, so that several may be in flight."""
        submitted = [self.submit() for _ in range(count)]
        for batch in submitted:
            if batch is not None:
                self.check(*batch)

    def recapture_one(self):
        place = self.choose.randrange(len(self.graphs))
        configuration = self.graphs[place].configuration
        with self.changing:
            self.graphs[place] = None
            self.graphs[place] = Graph(self, *configuration)
        self.counts["captures"] += 1

    def memory(self):
        """MiB that torch holds on the device and that the process has in RAM, with nothing going on.

        Without what the safetensors library loses.
        """
        with self.changing:
            torch.cuda.synchronize()
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            leaked = self.tensors_from_files * SAFETENSORS_LEAK_BYTES
            return torch.cuda.memory_allocated() / MIB, (pages * 4096 - leaked) / MIB

    def run(self, seconds):
        """Returns the memory after the first tenth of the time and at the end."""
        loader = threading.Thread(target=self.change_adapters)
        loader.start()
        start = last_report = time.monotonic()
        early = None
        try:
            while (now := time.monotonic()) < start + seconds and not self.stop.is_set():
                self.submit_and_check(self.choose.randint(1, 4))
                if self.choose.random() < 0.005:
                    self.recapture_one()
                if early is None and now > start + seconds / 10:
                    early = self.memory()
                if now > last_report + 20:
                    last_report = now
                    print(f"{now - start:5.0f} s: {self.summary()}", flush=True)
        finally:
            self.stop.set()
            loader.join()
        if self.failure is not None:
            raise self.failure
        return early, self.memory()

    def summary(self):
        return ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))


def main(argv):
    seconds = float(argv[0]) if argv else 600.0
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder))
        try:
            early, late = soak.run(seconds)
        except Exception as error:
            print(f"FAILED after {soak.summary()}: {type(error).__name__}: {error}")
            return 1
    grown = [after - before for before, after in zip(early, late, strict=True)]
    memory = f"device {late[0]:.1f} MiB ({grown[0]:+.1f}), process {late[1]:.0f} MiB ({grown[1]:+.0f})"
    if grown[0] > 1 or grown[1] > 64:
        print(f"FAILED: memory grew: {memory}; {soak.summary()}")
        return 1
    print(f"ok: {seconds:.0f} s without a mismatch; {memory}; {soak.summary()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
