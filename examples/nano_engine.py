"""An LLM inference engine in one file, to be read in an evening. It imports nothing from quire.

It has the ideas that make serving fast, each in its shortest honest form:

    BlockManager   the KV cache in blocks of 16 tokens, shared between sequences that begin with the same tokens
    Scheduler      continuous batching: every step mixes next tokens of running sequences with chunks of new prompts
    attention      one Triton kernel for prompts and for decoding, reading keys and values through block tables
    Model          Llama and Qwen3, weights fused where it saves launches
    Runner         one step on the device; steps that only decode replay a CUDA graph
    LLM            prompts in, tokens out, with the names that vLLM uses

What it leaves out is what quire is for: steps planned while one runs, sampling on the device, parallelism, a server.

    python examples/nano_engine.py MODEL_FOLDER "The capital of France is" "Water boils at"
"""

# ruff: noqa: N803
from __future__ import annotations

import hashlib
import json
import math
import sys
from array import array
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 16  # tokens of a KV block

# --- Sequences and blocks ---


@dataclass
class SamplingParams:
    """How the tokens of one sequence are chosen, and when it ends."""

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    detokenize: bool = True


@dataclass(eq=False)
class Sequence:
    """One prompt and what was generated after it.

    There is no prefill phase and no decode phase: a sequence has tokens, `computed` of them have their keys and values
    in the cache, and a step moves that number forward, by a chunk while it is a prompt and by one afterwards.
    """

    tokens: list[int]
    params: SamplingParams
    prompt_len: int
    computed: int = 0
    row: int = -1  # its line of the block table while it runs
    blocks: list[int] = field(default_factory=list)
    in_table: int = 0  # how many of its blocks the device knows
    keys: list[bytes] = field(default_factory=list)  # content keys of its full blocks, computed when needed

    def key(self, index: int) -> bytes:
        """The content of block `index` and of everything before it, in 16 bytes: equal key, equal keys and values."""
        while len(self.keys) <= index:
            start = len(self.keys) * BLOCK
            parent = self.keys[-1] if self.keys else b""
            content = parent + array("i", self.tokens[start : start + BLOCK]).tobytes()
            self.keys.append(hashlib.blake2b(content, digest_size=16).digest())
        return self.keys[index]


class BlockManager:
    """Which blocks of the KV cache are free, how many sequences hold each, and what the full ones contain.

    A released block keeps its content: it waits at the end of the free list, and a sequence with the same beginning
    takes it from there. Blocks are overwritten from the front of the list, so the least recently used goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # rows that pad write to block 0
        self.by_key: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}

    def match(self, sequence: Sequence) -> list[int]:
        """The cached blocks that the sequence begins with. Its last token is left out: its logits are wanted."""
        found = []
        for index in range((len(sequence.tokens) - 1) // BLOCK):
            block = self.by_key.get(sequence.key(index))
            if block is None:
                break
            found.append(block)
        return found

    def share(self, block: int) -> None:
        if self.refs[block] == 0:
            del self.free[block]
        self.refs[block] += 1

    def allocate(self) -> int:
        block, _ = self.free.popitem(last=False)
        self.refs[block] = 1
        if (key := self.key_of.pop(block, None)) is not None:
            del self.by_key[key]
        return block

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):  # the end of a sequence is overwritten before its beginning
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None
                if block not in self.key_of:
                    self.free.move_to_end(block, last=False)  # nothing in it can be found again

    def register(self, sequence: Sequence, before: int) -> None:
        """The blocks that were filled since `before` tokens were computed can be found by their content now."""
        for index in range(before // BLOCK, sequence.computed // BLOCK):
            key, block = sequence.key(index), sequence.blocks[index]
            if key not in self.by_key:
                self.by_key[key], self.key_of[block] = block, key


# --- Scheduling ---


@dataclass
class Work:
    """What a step computes of one sequence: its next `count` tokens after the first `computed`."""

    sequence: Sequence
    count: int

    @property
    def samples(self) -> bool:
        """Whether the step ends with the sequence's last token, so that a new one is drawn."""
        return self.sequence.computed + self.count == len(self.sequence.tokens)


class Scheduler:
    """Chooses what the next step computes, under a budget of tokens and as far as there are blocks."""

    def __init__(self, blocks: BlockManager, max_rows: int, token_budget: int) -> None:
        self.blocks = blocks
        self.token_budget = token_budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of admission: the last one is preempted first, so the first one always finishes."""
        self.free_rows = list(range(max_rows))[::-1]

    def schedule(self) -> list[Work]:
        step: list[Work] = []
        budget = self.token_budget
        was_preempted = False
        position = 0
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            count = min(len(sequence.tokens) - sequence.computed, budget)
            while not self._grow(sequence, count):
                was_preempted = True
                if self._preempt() is sequence:
                    break
            else:
                step.append(Work(sequence, count))
                budget -= count
                position += 1
        while self.waiting and self.free_rows and budget > 0 and not was_preempted:
            if (work := self._admit(self.waiting[0], budget)) is None:
                break
            self.waiting.popleft()
            step.append(work)
            budget -= work.count
        return step

    def _admit(self, sequence: Sequence, budget: int) -> Work | None:
        """Give the sequence a row and the blocks of its first chunk; what is cached of its prompt is not computed."""
        for block in self.blocks.match(sequence):
            self.blocks.share(block)
            sequence.blocks.append(block)
        sequence.computed = len(sequence.blocks) * BLOCK
        count = min(len(sequence.tokens) - sequence.computed, budget)
        if not self._grow(sequence, count):
            self._drop_blocks(sequence)
            return None
        sequence.row = self.free_rows.pop()
        self.running.append(sequence)
        return Work(sequence, count)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Blocks for the next `count` tokens; False, and nothing changed, when there are not enough."""
        missing = -(-(sequence.computed + count) // BLOCK) - len(sequence.blocks)
        if missing > len(self.blocks.free):
            return False
        sequence.blocks += [self.blocks.allocate() for _ in range(missing)]
        return True

    def _preempt(self) -> Sequence:
        """The sequence admitted last gives its blocks back. It keeps its tokens and is computed again later."""
        self.waiting.appendleft(self.running.pop())
        self._leave(self.waiting[0])
        return self.waiting[0]

    def _leave(self, sequence: Sequence) -> None:
        self.free_rows.append(sequence.row)
        sequence.row = -1
        self._drop_blocks(sequence)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.in_table = 0

    def update(self, step: list[Work], sampled: list[int], eos: set[int]) -> None:
        """Add the tokens that were drawn; sequences that have ended leave."""
        tokens = iter(sampled)
        for work in step:
            sequence, is_sampled, before = work.sequence, work.samples, work.sequence.computed
            sequence.computed += work.count
            self.blocks.register(sequence, before)
            if not is_sampled:
                continue
            sequence.tokens.append(next(tokens))
            params = sequence.params
            is_full = len(sequence.tokens) - sequence.prompt_len >= params.max_tokens
            if is_full or (not params.ignore_eos and sequence.tokens[-1] in eos):
                self.running.remove(sequence)
                self._leave(sequence)


# --- Attention over blocks ---


@dataclass
class Inputs:
    """One step as the model sees it: tokens of all sequences one after the other, and where their caches are."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor  # where each token's key and value go: block * BLOCK + offset
    rows: Tensor  # each sequence's line of `tables`
    query_starts: Tensor  # sequence i computes tokens query_starts[i] to query_starts[i + 1]
    contexts: Tensor  # tokens that each sequence has in the cache once this step's are written
    tables: Tensor
    tile_sequences: Tensor
    tile_queries: Tensor  # tile i of the kernel begins with query tile_queries[i] of sequence tile_sequences[i]
    queries_a_tile: int


try:
    import triton
    import triton.language as tl
except ImportError:  # without a GPU nothing here needs it
    triton = None

if triton is not None:

    @triton.jit
    def _attention_kernel(
        q, out, keys, values, rows, query_starts, contexts, tables, tile_sequences, tile_queries, scale, table_stride,
        KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
        TILE: tl.constexpr, LINES: tl.constexpr, STRIDE: tl.constexpr,
    ):  # fmt: skip
        """FlashAttention for a tile of queries of one sequence and all query heads that share one KV head.

        Those heads read the same keys, so (query, head) pairs are the lines of one matrix: a decode of a model with 4
        query heads a KV head is a product of 4 lines, not 4 products. Bytes: each key and value once a tile.
        """
        tile, head = tl.program_id(0), tl.program_id(1)
        sequence = tl.load(tile_sequences + tile)
        begin = tl.load(query_starts + sequence)
        num_queries = tl.load(query_starts + sequence + 1) - begin
        context = tl.load(contexts + sequence)
        table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride

        line = tl.arange(0, LINES)
        query = tl.load(tile_queries + tile) + line // GROUP
        is_query = (query < num_queries) & (line < TILE * GROUP)
        position = context - num_queries + query
        dims = tl.arange(0, DIM)
        places = ((begin + query) * KV_HEADS * GROUP + head * GROUP + line % GROUP).to(tl.int64) * DIM
        mine = tl.load(q + places[:, None] + dims, mask=is_query[:, None], other=0.0)

        best = tl.full([LINES], -float("inf"), tl.float32)
        total = tl.zeros([LINES], tl.float32)
        sums = tl.zeros([LINES, DIM], tl.float32)
        end = tl.max(tl.where(is_query, position, 0)) + 1
        for start in range(0, end, STRIDE):
            past = start + tl.arange(0, STRIDE)
            is_past = past < end
            block = tl.load(table + past // PAGE, mask=is_past, other=0).to(tl.int64)
            slots = ((block * PAGE + past % PAGE) * KV_HEADS + head) * DIM
            key = tl.load(keys + slots[:, None] + dims, mask=is_past[:, None], other=0.0)
            scores = tl.dot(mine, tl.trans(key), input_precision="ieee") * (scale * 1.4426950408889634)
            scores = tl.where(past[None, :] <= position[:, None], scores, -float("inf"))
            now = tl.maximum(best, tl.max(scores, 1))
            shrink = tl.exp2(best - now)
            weights = tl.exp2(scores - now[:, None])
            value = tl.load(values + slots[:, None] + dims, mask=is_past[:, None], other=0.0)
            sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
            best = now
        tl.store(out + places[:, None] + dims, (sums / total[:, None]).to(out.dtype.element_ty), is_query[:, None])


def attention(q: Tensor, cache: Tensor, inputs: Inputs, scale: float) -> Tensor:
    """Causal attention of the step's queries [tokens, heads, dim] over their sequences' blocks.

    `cache` is one layer's [2, blocks, BLOCK, kv_heads, dim]; this step's keys and values are in it already.
    """
    return (_kernel_attention if q.is_cuda else _plain_attention)(q, cache, inputs, scale)


def _kernel_attention(q: Tensor, cache: Tensor, inputs: Inputs, scale: float) -> Tensor:
    kv_heads, dim = cache.shape[-2:]
    out, group, tile = torch.empty_like(q), q.shape[1] // kv_heads, inputs.queries_a_tile
    _attention_kernel[(len(inputs.tile_sequences), kv_heads)](
        q, out, cache[0], cache[1], inputs.rows, inputs.query_starts, inputs.contexts, inputs.tables,
        inputs.tile_sequences, inputs.tile_queries, scale, inputs.tables.shape[1],
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, PAGE=BLOCK, TILE=tile,
        LINES=max(16, triton.next_power_of_2(tile * group)), STRIDE=64, num_warps=4 if tile > 1 else 2, num_stages=3,
    )  # fmt: skip
    return out


def _plain_attention(q: Tensor, cache: Tensor, inputs: Inputs, scale: float) -> Tensor:
    """What the kernel computes, for a CPU: sequence by sequence in plain torch."""
    out = torch.empty_like(q)
    starts, contexts, rows = inputs.query_starts.tolist(), inputs.contexts.tolist(), inputs.rows.tolist()
    for index, (context, row) in enumerate(zip(contexts, rows, strict=True)):
        begin, end = starts[index], starts[index + 1]
        blocks = inputs.tables[row, : -(-context // BLOCK)].long()
        keys, values = cache[:, blocks].flatten(1, 2)[:, :context].transpose(1, 2)  # each [kv_heads, context, dim]
        seen = torch.ones(end - begin, context, dtype=torch.bool).tril(context - (end - begin))
        mine = q[begin:end].transpose(0, 1)
        found = F.scaled_dot_product_attention(mine, keys, values, seen, scale=scale, enable_gqa=True)
        out[begin:end] = found.transpose(0, 1)
    return out


# --- The model: Llama and Qwen3 ---


def fused(function: Any) -> Any:
    """On a GPU a chain of elementwise operations becomes one kernel, whatever the number of tokens."""
    return torch.compile(function, dynamic=True) if torch.cuda.is_available() else function


@fused
def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stream = x if residual is None else x + residual
    wide = stream.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight, stream


@fused
def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@fused
def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary positions: x [tokens, heads, dim], cos_sin [tokens, 1, dim]."""
    cos, sin = cos_sin.chunk(2, -1)
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rope_table(config: dict[str, Any], dim: int, length: int) -> Tensor:
    """[length, 1, dim]: cosines, then sines. Knows the plain table and Llama 3's stretched one."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
        turns = old * frequencies / (2 * math.pi)  # how often it goes round within the lengths the model began with
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (blend + (1 - blend) / rope["factor"])
    elif kind != "default":
        raise ValueError(f"rope type {kind!r} is not supported: use a model with the default or the llama3 one")
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.cat([angles.cos(), angles.sin()], -1).float()[:, None]


class Layer(nn.Module):
    """Attention, then MLP, each on the norm of the residual stream and added back to it."""

    def __init__(self, config: dict[str, Any], **where: Any) -> None:
        super().__init__()
        hidden, width = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or hidden // self.heads
        self.eps = config["rms_norm_eps"]
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * self.dim, bias=False, **where)
        self.o = nn.Linear(self.heads * self.dim, hidden, bias=False, **where)
        self.gate_up = nn.Linear(hidden, 2 * width, bias=False, **where)
        self.down = nn.Linear(width, hidden, bias=False, **where)
        self.attention_norm = nn.Parameter(torch.ones(hidden, **where))
        self.mlp_norm = nn.Parameter(torch.ones(hidden, **where))
        self.has_qk_norm = config["model_type"] == "qwen3"
        if self.has_qk_norm:
            self.q_norm = nn.Parameter(torch.ones(self.dim, **where))
            self.k_norm = nn.Parameter(torch.ones(self.dim, **where))

    def forward(self, x: Tensor, residual: Tensor | None, cos_sin: Tensor, cache: Tensor, inputs: Inputs) -> Any:
        """Returns (what is to be added to the stream, the stream): the addition is part of the next norm."""
        normed, residual = add_rms_norm(x, residual, self.attention_norm, self.eps)
        widths = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in self.qkv(normed).split(widths, -1))
        if self.has_qk_norm:
            q, k = add_rms_norm(q, None, self.q_norm, self.eps)[0], add_rms_norm(k, None, self.k_norm, self.eps)[0]
        q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        flat = cache.view(2, -1, self.kv_heads, self.dim)
        flat[0][inputs.slots] = k
        flat[1][inputs.slots] = v
        found = attention(q, cache, inputs, self.dim**-0.5)
        normed, residual = add_rms_norm(self.o(found.flatten(1)), residual, self.mlp_norm, self.eps)
        return self.down(silu_mul(self.gate_up(normed))), residual


class Model(nn.Module):
    """Llama or Qwen3 without its sampler."""

    def __init__(self, config: dict[str, Any], max_len: int, **where: Any) -> None:
        super().__init__()
        if config["model_type"] not in ("llama", "qwen3") or config.get("attention_bias") or config.get("mlp_bias"):
            raise ValueError(f"model type {config['model_type']!r}: only Llama and Qwen3 without biases are here")
        self.layers = nn.ModuleList(Layer(config, **where) for _ in range(config["num_hidden_layers"]))
        self.embedding = nn.Parameter(torch.empty(config["vocab_size"], config["hidden_size"], **where))
        self.head = (
            self.embedding if config.get("tie_word_embeddings") else nn.Parameter(torch.empty_like(self.embedding))
        )
        self.norm = nn.Parameter(torch.ones(config["hidden_size"], **where))
        self.eps = config["rms_norm_eps"]
        self.cos_sin = rope_table(config, self.layers[0].dim, max_len).to(where["device"])

    def forward(self, inputs: Inputs, cache: Tensor) -> Tensor:
        """Hidden states [tokens, hidden]. `cache` is [layers, 2, blocks, BLOCK, kv_heads, dim]."""
        hidden, residual = F.embedding(inputs.tokens, self.embedding), None
        cos_sin = self.cos_sin[inputs.positions]
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            hidden, residual = layer(hidden, residual, cos_sin, layer_cache, inputs)
        return add_rms_norm(hidden, residual, self.norm, self.eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)

    def load(self, folder: Path) -> None:
        """Copy a checkpoint's tensors to their places. Fused weights are filled part by part."""
        from safetensors import safe_open

        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if (target := self._target(name)) is not None:
                        target.data.copy_(tensors.get_tensor(name))

    def _target(self, name: str) -> Tensor | None:
        """Where a checkpoint's tensor goes; None for the rotary tables of old checkpoints."""
        whole = {"model.embed_tokens": self.embedding, "lm_head": self.head, "model.norm": self.norm}
        path = name.removesuffix(".weight")
        if path in whole or "rotary" in path:
            return whole.get(path)
        layer: Any = self.layers[int(path.split(".")[2])]
        q, kv, width = layer.heads * layer.dim, layer.kv_heads * layer.dim, layer.down.in_features
        part = path.split(".")[-1]
        if part in ("q_norm", "k_norm"):
            return getattr(layer, part)
        return {
            "input_layernorm": layer.attention_norm,
            "post_attention_layernorm": layer.mlp_norm,
            "q_proj": layer.qkv.weight[:q],
            "k_proj": layer.qkv.weight[q : q + kv],
            "v_proj": layer.qkv.weight[q + kv :],
            "o_proj": layer.o.weight,
            "gate_proj": layer.gate_up.weight[:width],
            "up_proj": layer.gate_up.weight[width:],
            "down_proj": layer.down.weight,
        }[part]


# --- A step on the device ---


class Runner:
    """Runs steps: lays out their inputs, runs the model or replays a graph of it, and draws tokens."""

    def __init__(self, model: Model, cache: Tensor, max_rows: int, max_len: int, use_graphs: bool) -> None:
        self.model, self.cache, self.device = model, cache, cache.device
        self.group = model.layers[0].heads // model.layers[0].kv_heads
        self.host_tables = torch.zeros(max_rows, -(-max_len // BLOCK), dtype=torch.int32)
        self.tables = self.host_tables.to(self.device)
        self.columns = torch.zeros(5, max_rows, dtype=torch.int64, device=self.device)
        self.padding = torch.tensor([[0], [0], [0], [0], [1]], device=self.device)
        self.numbers = torch.arange(max_rows + 1, device=self.device)
        self.zeros = torch.zeros_like(self.numbers)
        self.graphs: dict[int, tuple[Any, Tensor]] = {}
        if use_graphs:
            for size in sorted(
                {max_rows, *(n for n in (1, 2, 4, *range(8, max_rows, 8)) if n < max_rows)}, reverse=True
            ):
                self.graphs[size] = self._capture(size)

    @torch.inference_mode()
    def run(self, step: list[Work]) -> list[int]:
        """Compute the step; the tokens drawn, in the order of the work that draws."""
        self._write_tables([work.sequence for work in step])
        if all(work.count == 1 and work.samples for work in step):
            logits = self._decode(step)
        else:
            logits = self._mixed(step)
        temperatures = [work.sequence.params.temperature for work in step if work.samples]
        return self._draw(logits, temperatures) if temperatures else []

    def _write_tables(self, sequences: list[Sequence]) -> None:
        """Tell the device of blocks that sequences have got since the last step."""
        grown = [sequence for sequence in sequences if sequence.in_table < len(sequence.blocks)]
        for sequence in grown:
            fresh = sequence.blocks[sequence.in_table :]
            line = self.host_tables[sequence.row]
            line[sequence.in_table : len(sequence.blocks)] = torch.tensor(fresh, dtype=torch.int32)
            sequence.in_table = len(sequence.blocks)
        if grown:
            self.tables.copy_(self.host_tables)

    def _decode(self, step: list[Work]) -> Tensor:
        """One token of every sequence: replayed from the smallest graph that has room for them."""
        count = len(step)
        size = min((size for size in self.graphs if size >= count), default=count)
        sequences = [work.sequence for work in step]
        positions = [sequence.computed for sequence in sequences]
        slots = [s.blocks[p // BLOCK] * BLOCK + p % BLOCK for s, p in zip(sequences, positions, strict=True)]
        contexts = [position + 1 for position in positions]
        tokens, rows = [s.tokens[-1] for s in sequences], [s.row for s in sequences]
        columns = [tokens, positions, slots, rows, contexts]
        self.columns[:, count:size] = self.padding  # a row that pads sees only what it writes to block 0
        self.columns[:, :count] = torch.tensor(columns)
        if size in self.graphs:
            graph, logits = self.graphs[size]
            graph.replay()
        else:
            logits = self.model.logits(self.model(self._decode_inputs(size), self.cache))
        return logits[:count]

    def _decode_inputs(self, size: int) -> Inputs:
        tokens, positions, slots, rows, contexts = self.columns[:, :size]
        starts, firsts = self.numbers[: size + 1], self.zeros[:size]
        return Inputs(tokens, positions, slots, rows, starts, contexts, self.tables, starts[:-1], firsts, 1)

    @torch.inference_mode()
    def _capture(self, size: int) -> tuple[Any, Tensor]:
        """Record a decode step of `size` rows: its hundreds of launches become one."""
        self.columns[:, :size] = self.padding
        inputs = self._decode_inputs(size)
        self.model.logits(self.model(inputs, self.cache))  # compiles what is not compiled yet
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool):
            logits = self.model.logits(self.model(inputs, self.cache))
        return graph, logits

    def _mixed(self, step: list[Work]) -> Tensor:
        """Chunks of prompts, with next tokens of other sequences among them."""
        tokens, positions, slots, starts, last, tile_sequences, tile_queries = [], [], [], [0], [], [], []
        tile = max(1, 64 // self.group)
        for index, work in enumerate(step):
            sequence, begin = work.sequence, work.sequence.computed
            end = begin + work.count
            tokens += sequence.tokens[begin:end]
            positions += range(begin, end)
            slots += [sequence.blocks[place // BLOCK] * BLOCK + place % BLOCK for place in range(begin, end)]
            starts.append(len(tokens))
            tile_queries += range(0, work.count, tile)
            tile_sequences += [index] * -(-work.count // tile)
            if work.samples:
                last.append(len(tokens) - 1)
        rows = [work.sequence.row for work in step]
        contexts = [work.sequence.computed + work.count for work in step]
        lists = [tokens, positions, slots, rows, starts, contexts, tile_sequences, tile_queries, last]
        *first, tile_sequences, tile_queries, last = (torch.tensor(one, device=self.device) for one in lists)
        hidden = self.model(Inputs(*first, self.tables, tile_sequences, tile_queries, tile), self.cache)
        return self.model.logits(hidden[last.long()])

    def _draw(self, logits: Tensor, temperatures: list[float]) -> list[int]:
        """Temperature 0: the likeliest token. Else the index of the largest p / e, e from Exp(1), is a draw from p."""
        if not any(temperatures):
            return logits.argmax(-1).tolist()
        heat = torch.tensor(temperatures, device=self.device)[:, None]
        probabilities = (logits.float() / heat.clamp(min=1e-5)).softmax(-1)
        drawn = (probabilities / torch.empty_like(probabilities).exponential_(1).clamp(min=1e-10)).argmax(-1)
        return torch.where(heat[:, 0] > 0, drawn, logits.argmax(-1)).tolist()


# --- The engine ---


Completion = namedtuple("Completion", "token_ids text")
RequestOutput = namedtuple("RequestOutput", "prompt_token_ids outputs")


class LLM:
    """A model behind one loop: schedule, run, update, until every sequence has ended."""

    def __init__(
        self, model: str, dtype: str = "auto", load_format: str = "auto", max_model_len: int = 4096,
        max_num_seqs: int = 256, max_num_batched_tokens: int = 8192, cache_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9, skip_tokenizer_init: bool = False, enforce_eager: bool = False,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """`model` is a folder with config.json and safetensors; load_format "dummy" fills in random weights instead.
        `cache_tokens`: size of the KV cache; unset, what `gpu_memory_utilization` leaves, or 65,536 tokens on a CPU."""
        folder = Path(model)
        config = json.loads((folder / "config.json").read_text())
        has_gpu = torch.cuda.is_available()
        device = torch.device("cuda" if has_gpu else "cpu")
        if dtype == "auto":
            dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
        self.max_model_len = min(max_model_len, config["max_position_embeddings"])
        torch.manual_seed(seed)
        where = {"device": device, "dtype": getattr(torch, dtype)}
        self.model = Model(config, self.max_model_len, **where)
        if load_format == "dummy":
            for parameter in self.model.parameters():
                parameter.data.normal_(0, 0.02)
        else:
            self.model.load(folder)
        ends = config.get("eos_token_id")
        self.eos = set(ends if isinstance(ends, list) else [ends])
        self.tokenizer: Any = None
        if not skip_tokenizer_init:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        layer = self.model.layers[0]
        shape = (len(self.model.layers), 2, BLOCK, layer.kv_heads, layer.dim)  # of a block, in all layers
        if cache_tokens is None:
            cache_tokens = 65536
            if has_gpu:  # a twentieth is kept for what a step computes with, and graphs
                free, total = torch.cuda.mem_get_info()
                room = free - total * (1.05 - gpu_memory_utilization)
                cache_tokens = int(room // (math.prod(shape) * where["dtype"].itemsize)) * BLOCK
        num_blocks = cache_tokens // BLOCK + 1
        cache = torch.zeros(shape[0], 2, num_blocks, *shape[2:], **where)
        self.blocks = BlockManager(num_blocks)
        self.scheduler = Scheduler(self.blocks, max_num_seqs, max_num_batched_tokens)
        self.runner = Runner(self.model, cache, max_num_seqs, self.max_model_len, has_gpu and not enforce_eager)

    def generate(self, prompts: Any, params: Any = None, use_tqdm: bool = False) -> list[RequestOutput]:
        """Texts, lists of token ids, or {"prompt_token_ids": ids}; one SamplingParams for all of them, or one each."""
        params = params or SamplingParams()
        if not isinstance(params, list):
            params = [params] * len(prompts)
        sequences = [self._sequence(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        self.scheduler.waiting.extend(sequences)
        while self.scheduler.waiting or self.scheduler.running:
            self.step()
        return [self._output(sequence) for sequence in sequences]

    def step(self) -> None:
        step = self.scheduler.schedule()
        sampled = self.runner.run(step)
        self.scheduler.update(step, sampled, self.eos)

    def _sequence(self, prompt: Any, params: SamplingParams) -> Sequence:
        if isinstance(prompt, dict):
            prompt = prompt["prompt_token_ids"]
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        length = len(tokens) + params.max_tokens
        if not tokens or length > self.max_model_len:
            raise ValueError(f"{len(tokens)} + {params.max_tokens} tokens: there is room for 1 to {self.max_model_len}")
        if -(-length // BLOCK) >= len(self.blocks.refs):
            raise ValueError(f"{length} tokens do not fit a cache of {BLOCK * (len(self.blocks.refs) - 1)}")
        return Sequence(tokens, params, len(tokens))

    def _output(self, sequence: Sequence) -> RequestOutput:
        prompt, output = sequence.tokens[: sequence.prompt_len], sequence.tokens[sequence.prompt_len :]
        is_text = self.tokenizer is not None and sequence.params.detokenize
        text = self.tokenizer.decode(output, skip_special_tokens=True) if is_text else ""
        return RequestOutput(prompt, [Completion(output, text)])

    def reset_prefix_cache(self) -> None:
        self.blocks.by_key.clear()
        self.blocks.key_of.clear()


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    outputs = LLM(sys.argv[1]).generate(sys.argv[2:], SamplingParams(temperature=0, max_tokens=64))
    for prompt, output in zip(sys.argv[2:], outputs, strict=True):
        print(f"{prompt!r} → {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
