"""Memory and time of one training step of a large model, computed by published formulas.

Nothing here is measured. Each line of a plan names its formula, and the table `SOURCES` the publication.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

from ddp_notebook.errors import UsageError
from ddp_notebook.records import units

SOURCES = {
    "ZeRO": "https://arxiv.org/abs/1910.02054",  # bytes of mixed precision training with Adam, and their shards
    "Megatron-LM": "https://arxiv.org/abs/2104.04473",  # floating-point operations, messages, bubble of a pipeline
    "activations": "https://arxiv.org/abs/2205.05198",  # bytes of activations of a layer
    "Llama 3": "https://arxiv.org/abs/2407.21783",  # sizes of the model
    "H100": "https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306",  # memory, peak and NVLink
    "nccl-tests": "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md",  # time of a collective
}
RESERVE_GB = 4.0  # for CUDA, NCCL and fragments: an assumption


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """Sizes of a transformer as in Llama 3: grouped attention and three matrices in each feed-forward layer."""

    layers: int = 80
    hidden: int = 8192
    heads: int = 64
    key_value_heads: int = 8
    feed_forward: int = 28_672
    vocabulary: int = 128_256

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: queries and output, keys and values, feed-forward, two norms."""
        attention = 2 * self.hidden**2 * (1 + self.key_value_heads / self.heads)
        return round(attention) + 3 * self.hidden * self.feed_forward + 2 * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Parameters outside of the layers: embedding, output head and the last norm."""
        return 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCluster:
    """Nodes with eight H100 GPUs, and one network card of 400 Gbit/s for each GPU."""

    nodes: int = 2
    gpus_per_node: int = 8
    memory_gb: float = 80.0
    peak_tflops: float = 989.0  # bfloat16 without sparsity
    in_node_gb_s: float = 450.0  # NVLink, one direction
    card_gb_s: float = 50.0
    reached: float = 0.55  # share of the peak while a GPU computes: an assumption

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def bandwidth_gb_s(self, size: int, stride: int) -> float:
        """Bandwidth of each rank in a collective of `size` ranks whose numbers differ by `stride`.

        A group inside of a node uses NVLink. The rings of a larger group leave the node through the network cards of
        all its members on the node.
        """
        if size * stride <= self.gpus_per_node:
            return self.in_node_gb_s
        on_a_node = max(1, self.gpus_per_node // stride)
        return min(self.in_node_gb_s, on_a_node * self.card_gb_s)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plan."""

    name: str
    value: float  # bytes or seconds
    formula: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A mesh for a training run of a large model, with its memory and its time.

    The ranks of a tensor-parallel group are neighbours. Shards come next, then stages, then replicas.

    Args:
        replicate: Number of replicas that average gradients, as in DDP or HSDP.
        shard: Number of ranks over which FSDP shards parameters, gradients and optimizer state.
        tensor: Number of ranks that divide each layer, with sequence parallelism.
        pipeline: Number of pipeline stages.
        microbatch: Sequences in one forward pass.
        sequences: Sequences in one step, over all ranks.
        length: Tokens in a sequence.
        recompute: Keep only the input of each layer, and compute the layer again in the backward pass.
        model: Sizes of the model; None for Llama 3 70B.
        cluster: The GPUs; None for two nodes of eight H100.

    Raises:
        UsageError: The mesh does not use each GPU once, or the batch cannot be divided.

    Example:
        >>> lessons.plan(shard=16, recompute=True).fits
        False
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatch: int = 1
    sequences: int = 128
    length: int = 8192
    recompute: bool = False
    model: LanguageModel = LanguageModel()
    cluster: GpuCluster = GpuCluster()

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("replicate", "shard", "tensor", "pipeline")}
        for name, size in {**sizes, "microbatch": self.microbatch}.items():
            if size < 1:
                raise UsageError(f"{name} must be at least 1, got {size}")
        product = self.replicate * self.shard * self.tensor * self.pipeline
        if product != self.cluster.gpus:
            words = " x ".join(f"{name} {size}" for name, size in sizes.items())
            raise UsageError(f"the mesh must have {self.cluster.gpus} GPUs; {words} = {product}")
        if self.model.layers % self.pipeline:
            raise UsageError(f"pipeline must divide the {self.model.layers} layers, got {self.pipeline}")
        if self.sequences % (self.data_parallel * self.microbatch):
            raise UsageError(
                f"{self.sequences} sequences cannot be divided by {self.data_parallel} (replicate x shard) times a "
                f"microbatch of {self.microbatch}"
            )

    # ---- sizes

    @property
    def data_parallel(self) -> int:
        """Number of different batches: each replica and each shard computes its own."""
        return self.replicate * self.shard

    @property
    def microbatches(self) -> int:
        """Forward passes of a rank in one step."""
        return self.sequences // (self.data_parallel * self.microbatch)

    @property
    def _own_parameters(self) -> float:
        """Parameters of a rank's stage and part of each layer, before FSDP shards them."""
        return self.model.parameters / (self.tensor * self.pipeline)

    @property
    def _activation(self) -> float:
        """Bytes of one activation tensor of a microbatch on one rank: length x microbatch x hidden, bfloat16."""
        return 2.0 * self.length * self.microbatch * self.model.hidden / self.tensor

    # ---- memory

    def memory(self) -> list[Line]:
        """Return the bytes on the fullest GPU, by kind."""
        return [
            Line(
                "parameters, gradients, Adam", 16 * self._own_parameters / self.shard, "16 bytes x P / (s t p)", "ZeRO"
            ),
            self._gathered(),
            self._activations(),
            self._logits(),
        ]

    def _gathered(self) -> Line:
        if self.shard == 1:
            return Line("gathered layers", 0.0, "none without FSDP", "ZeRO")
        # the layer that computes, the one that is prefetched, and the gradient of one layer
        layers = 3 * 2 * self.model.layer_parameters / self.tensor
        outer = 2 * self.model.outer_parameters / self.tensor
        return Line("gathered layers", layers + outer, "2 bytes x (3 layers + embedding and head) / t", "ZeRO")

    def _activations(self) -> Line:
        in_flight = min(self.pipeline, self.microbatches)  # 1F1B keeps this number of microbatches on the first stage
        layers = self.model.layers / self.pipeline
        if self.recompute:
            nbytes = in_flight * layers * self._activation + 17 * self._activation
            return Line("activations", nbytes, "(2 x layers / p x in flight + 34) b s h / t", "activations")
        return Line(
            "activations",
            in_flight * layers * 17 * self._activation,
            "34 b s h / t x layers / p x in flight",
            "activations",
        )

    def _logits(self) -> Line:
        nbytes = 8.0 * self.length * self.microbatch * self.model.vocabulary / self.tensor
        return Line("logits and their gradient", nbytes, "2 x 4 bytes x b s V / t", "Llama 3")

    @property
    def nbytes(self) -> float:
        """Bytes on the fullest GPU."""
        return sum(line.value for line in self.memory())

    @property
    def fits(self) -> bool:
        """Return whether the plan leaves `RESERVE_GB` of each GPU free."""
        return self.nbytes <= (self.cluster.memory_gb - RESERVE_GB) * 1e9

    # ---- time

    @property
    def compute_s(self) -> float:
        """Seconds of computation in one step, without bubble."""
        tokens = self.sequences * self.length
        passes = 4 if self.recompute else 3  # forward, backward (twice a forward), and the forward again
        matrices = 2 * passes * self.model.parameters * tokens
        attention = 2 * passes * self.model.layers * self.model.hidden * self.length * tokens  # causal: the half
        return (matrices + attention) / (self.cluster.gpus * self.cluster.peak_tflops * 1e12 * self.cluster.reached)

    def time(self) -> list[Line]:
        """Return the seconds of one step, by kind. Only exposed communication counts."""
        sharding_s = self._sharding_s()
        replicas_s = self._collective_s(
            2 * 2 * self._own_parameters / self.shard, self.replicate, self._stride("replicate")
        )
        hidden_s = self.compute_s  # FSDP prefetches the next layer, DDP hides behind the last backward
        hidden_of_replicas_s = self.compute_s / self.microbatches / 2
        bubble_s = (self.compute_s + self._tensor_s()) * (self.pipeline - 1) / self.microbatches
        return [
            Line(
                "computation",
                self.compute_s,
                f"{8 if self.recompute else 6} P tokens and attention / (GPUs x reached peak)",
                "Megatron-LM",
            ),
            Line(
                "tensor parallel, exposed",
                self._tensor_s(),
                f"{6 if self.recompute else 4} all-reduces of b s h per layer",
                "Megatron-LM",
            ),
            Line(
                "FSDP, exposed",
                max(0.0, sharding_s - hidden_s),
                "3 x 2 bytes x P / (t p) per microbatch, less computation",
                "ZeRO",
            ),
            Line(
                "replicas, exposed",
                max(0.0, replicas_s - hidden_of_replicas_s),
                "all-reduce of 2 bytes x P / (s t p), less half a pass",
                "ZeRO",
            ),
            Line("pipeline bubble", bubble_s, "(p - 1) / microbatches", "Megatron-LM"),
        ]

    def _stride(self, dimension: str) -> int:
        inner = {"tensor": 1, "shard": self.tensor, "replicate": self.tensor * self.shard * self.pipeline}
        return inner[dimension]

    def _collective_s(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds of an all-gather or reduce-scatter of `nbytes`; an all-reduce counts its bytes twice."""
        if size == 1:
            return 0.0
        return nbytes * (size - 1) / size / (self.cluster.bandwidth_gb_s(size, stride) * 1e9)

    def _sharding_s(self) -> float:
        once = self._collective_s(2 * self._own_parameters, self.shard, self._stride("shard"))
        return 3 * once * self.microbatches

    def _tensor_s(self) -> float:
        whole = self._activation * self.tensor
        one = self._collective_s(2 * whole, self.tensor, 1)
        return (6 if self.recompute else 4) * one * self.model.layers / self.pipeline * self.microbatches

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return sum(line.value for line in self.time())

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all GPUs together."""
        return self.sequences * self.length / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOP/s utilisation: useful operations over the peak. Recomputation is not useful."""
        per_token = 6 * self.model.parameters + 6 * self.model.layers * self.model.hidden * self.length
        return per_token * self.tokens_per_s / (self.cluster.gpus * self.cluster.peak_tflops * 1e12)

    # ---- words

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the table: name, value, formula, source."""
        memory = [(line.name, units.size(line.value), line.formula, line.source) for line in self.memory()]
        time = [(line.name, f"{line.value:.2f} s", line.formula, line.source) for line in self.time()]
        return [
            *memory,
            ("memory of a GPU", f"{units.size(self.nbytes)} of {self.cluster.memory_gb:g} GB", self._verdict, ""),
            *time,
            ("step", f"{self.step_s:.2f} s", f"{self.tokens_per_s:,.0f} tokens/s, MFU {self.mfu:.0%}", ""),
        ]

    @property
    def _verdict(self) -> str:
        return "fits" if self.fits else f"does not fit: {RESERVE_GB:g} GB must stay free"

    def __repr__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[at]) for row in rows) for at in range(2)]
        return "\n".join(f"{name:{widths[0]}}  {value:>{widths[1]}}  {formula}" for name, value, formula, _ in rows)

    def _repr_html_(self) -> str:
        lines = []
        for name, value, formula, source in self.rows():
            link = f'<a href="{SOURCES[source]}">{source}</a>' if source else ""
            bold = name in ("memory of a GPU", "step")
            cells = [name, value, formula]
            cells = [f"<b>{html.escape(cell)}</b>" if bold else html.escape(cell) for cell in cells]
            lines.append(
                "<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in [*cells, link]) + "</tr>"
            )
        return f"<table>{''.join(lines)}</table>"
