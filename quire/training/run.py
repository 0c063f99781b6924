"""`train_draft`: from data and a model to a head in a folder, in phases that can be resumed.

The folder `work` in the output folder holds what is done: the sequences, what the target computed for them, and the
state of the training. A run that was interrupted goes on from there.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.loading.files import ModelFiles
from quire.loading.hub import find_model
from quire.loading.model_config import ModelConfig, read_model_config, weights_fingerprint
from quire.loading.progress import count_bar
from quire.loading.tokenizer import tokenizer_of
from quire.platforms import choose
from quire.training.data import Data, DataReader, usable
from quire.training.head import DraftHead, HeadShape, write_head
from quire.training.store import FeatureStore, FeatureWriter, TokenSequence, read_sequences, write_sequences
from quire.training.target import TargetModel
from quire.training.trainer import HeldOutAcceptance, Trainer, TrainSettings, measure
from quire.worker.building import DTYPES

GENERATION_ENDS, FEATURES_END = 0.35, 0.5
"""With a time limit: the shares of it after which generating and reading features end, with what there is."""
RESERVED_SECONDS = 10.0
"""Of a time limit, for the last measurement and the files."""
MOST_HELD_OUT = 256
VOCAB_MULTIPLE = 64
DEFAULT_COVERAGE = 0.99
MIN_ANSWER = 16
"""Tokens that a sequence has beside its prompt, if the target is to answer it."""
REPORT = "training.json"


@dataclass(frozen=True)
class DraftSettings:
    """What a head is trained on, and how."""

    data: tuple[Path, ...] = ()
    traffic: Path | None = None
    """A folder with what a server recorded, instead of `data` or beside it."""
    held_out: tuple[Path, ...] = ()
    """Files to measure the acceptance on; none: a share of the data, which is not trained on."""
    held_out_share: float = 0.05
    regenerate: int | None = None
    """The target answers the prompts itself, in at most this many tokens."""
    answers: int = 2
    """Answers to each prompt: the first greedy, the others sampled."""
    temperature: float = 0.7
    max_length: int = 1024
    """Tokens of a sequence."""
    draft_vocab: int | None = None
    """Tokens that the head can propose; None: as many as cover 99 % of the learned ones."""
    intermediate_size: int | None = None
    feature_layers: tuple[int, ...] | None = None
    minutes: float | None = None
    """Of the whole run."""
    dtype: str = "bfloat16"
    """Of the written weights."""
    keep_work: bool = False
    train: TrainSettings = field(default_factory=TrainSettings)


@dataclass
class DraftReport:
    """What was trained."""

    folder: Path
    num_bytes: int
    parameters: int
    sequences: int
    tokens: int
    learned_tokens: int
    held_out_sequences: int
    draft_vocab: int
    coverage: float
    """Share of the learned tokens that the head can propose."""
    before: HeldOutAcceptance
    after: HeldOutAcceptance
    steps: int
    epochs: float
    seconds: dict[str, float]
    """Of each phase."""
    losses: list[float]

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        found = dataclasses.asdict(self)
        found["folder"] = str(self.folder)
        for name in ("before", "after"):
            found[name]["tokens_per_step"] = getattr(self, name).tokens_per_step
        return found


Show = Callable[[Trainer, Any], None]
Note = Callable[[str], None]


def train_draft(
    config: EngineConfig,
    output: Path,
    settings: DraftSettings,
    note: Note = lambda text: None,
    bar: Callable[[Trainer], AbstractContextManager[Show]] | None = None,
) -> DraftReport:
    """Train a head for the configured model and write it to the folder `output`.

    `note` is told what happens; `bar(trainer)` shows the training's steps.
    """
    return _Run(config, output, settings, note).run(bar)


class _Run:
    def __init__(self, config: EngineConfig, output: Path, settings: DraftSettings, note: Note) -> None:
        if not settings.data and settings.traffic is None:
            raise ValidationError("there is no data: give --data or --from-traffic", "data")
        self.config, self.output, self.settings, self.note = config, output, settings, note
        self.files: ModelFiles = find_model(config)
        self.model: ModelConfig = read_model_config(self.files, config.hf_overrides)
        self.max_length = min(settings.max_length, self.model.max_position)
        self.platform = choose(config.device)
        self.work = output / "work"
        # A shape that is impossible is refused before anything is computed.
        self.layers = HeadShape.of_target(self.model, 1, settings.feature_layers).feature_layers
        self._clock = _Clock(self.work / "seconds.json", settings.minutes)
        self._open_folder()

    def _open_folder(self) -> None:
        identity = self._identity()
        path = self.work / "settings.json"
        if path.exists():
            if path.read_text() != identity:
                raise ValidationError(
                    f"{self.work} belongs to a run with other settings, data or weights: give another output folder, "
                    "or remove it",
                    "output",
                    str(self.output),
                )
            self.note(f"going on with the run in {self.work}")
            return
        if self.output.exists() and (not self.output.is_dir() or any(self.output.iterdir())):
            raise ValidationError(f"{self.output} exists and is not an empty folder", "output", str(self.output))
        self.work.mkdir(parents=True)
        path.write_text(identity)

    def _identity(self) -> str:
        """What must be the same for a run to go on."""
        described = dataclasses.asdict(self.settings)
        for name in ("minutes", "keep_work"):
            described.pop(name)
        described["train"].pop("seconds")
        described["files"] = [
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else str(path)
            for path in (*self.settings.data, *self.settings.held_out)
        ]
        weights = weights_fingerprint(self.files, self.model, self.config.load_format, self.config.seed)
        return json.dumps({**described, "weights": weights.hex()}, indent=1, default=str, sort_keys=True)

    def run(self, bar: Callable[[Trainer], AbstractContextManager[Show]] | None) -> DraftReport:
        train, held_out = self._sequences()
        tokens, coverage = choose_tokens(
            train, self.model.vocab_size, self.settings.draft_vocab, self.model.eos_token_ids
        )
        self.note(
            f"{len(train)} sequences of {sum(map(len, train))} tokens, {len(held_out)} held out; draft vocabulary of "
            f"{len(tokens)} tokens, {coverage:.2%} of those to learn ({_coverages(train, self.model.vocab_size)})"
        )
        self._read_features(train, held_out, torch.from_numpy(tokens))
        return self._train(train, held_out, torch.from_numpy(tokens), coverage, bar)

    # Sequences

    def _sequences(self) -> tuple[list[TokenSequence], list[TokenSequence]]:
        paths = self.work / "train.safetensors", self.work / "held_out.safetensors"
        if not paths[1].exists():
            with self._clock.phase("data"):
                parts = self._make_sequences()
            for path, sequences in zip(paths, parts, strict=True):
                write_sequences(path, sequences)
        train, held_out = map(read_sequences, paths)
        return train, held_out

    def _make_sequences(self) -> tuple[list[TokenSequence], list[TokenSequence]]:
        settings = self.settings
        tokenizer = tokenizer_of(self.config, self.files)
        reader = DataReader(tokenizer, self.max_length)
        answers = settings.regenerate is not None
        found, held = Data(), Data()
        for path in settings.data:
            _extend(found, reader.read_file(path, answers))
        if settings.traffic is not None:
            _extend(found, reader.read_traffic(settings.traffic, answers))
        for path in settings.held_out:
            _extend(held, reader.read_file(path, answers))
        random = np.random.default_rng(settings.train.seed)
        if not settings.held_out:
            held.prompts, found.prompts = _split(found.prompts, settings.held_out_share, random)
            held.sequences, found.sequences = _split(usable(found.sequences), settings.held_out_share, random)
        if answers:
            made = self._answer(reader, found.prompts, held.prompts)
            found.sequences += made[0]
            held.sequences += made[1]
        train, held_out = usable(found.sequences), usable(held.sequences)[:MOST_HELD_OUT]
        if not train or not held_out:
            raise ValidationError(
                f"the data gives {len(train)} sequences to train on and {len(held_out)} to measure with; at least one "
                "of each is needed",
                "data",
            )
        order = random.permutation(len(train))
        return [train[index] for index in order], held_out

    def _answer(
        self, reader: DataReader, prompts: Sequence[list[int]], held_out: Sequence[list[int]]
    ) -> tuple[list[TokenSequence], list[TokenSequence]]:
        """The target's answers to the prompts, and its greedy ones to those held out."""
        from quire.api.llm import LLM
        from quire.messages.sampling import RequestOutputKind, SamplingParams

        settings = self.settings
        assert settings.regenerate is not None

        def params(number: int, seed: int) -> SamplingParams:
            return SamplingParams(
                max_tokens=settings.regenerate, temperature=settings.temperature if number else 0.0, seed=seed,
                output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False,
            )  # fmt: skip

        longest = self.max_length - MIN_ANSWER
        held_prompts = [prompt for prompt in held_out if len(prompt) <= longest][:MOST_HELD_OUT]
        asked = [(prompt, params(0, 0)) for prompt in held_prompts]
        for number in range(settings.answers):
            asked += [(p, params(number, seed)) for seed, p in enumerate(prompts) if len(p) <= longest]
        self.note(f"the model answers {len(asked)} prompts")
        config = dataclasses.replace(self.config, max_model_len=self.max_length)
        parts: tuple[list[TokenSequence], list[TokenSequence]] = ([], [])
        tokens = 0
        with LLM.from_engine_args(config) as llm, count_bar("answering prompts", len(asked)) as show:
            inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in asked]
            done = 0
            for output in llm.stream(inputs, [each for _, each in asked]):
                prompt, answer = list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)
                made = reader.sequence([*prompt, *answer], [(len(prompt), len(prompt) + len(answer))])
                # An engine numbers its requests from 0.
                parts[int(output.request_id) < len(held_prompts)].append(made)
                tokens += len(answer)
                done += 1
                show(done)
                if self._clock.passed(GENERATION_ENDS):
                    self.note(f"time is up for answers: {done} of {len(asked)}")
                    break
        self.note(f"{done} answers of {tokens} tokens in {self._clock.elapsed:.0f} s")
        if self.platform.device.type == "cuda":
            gc.collect()  # the engine's graphs and cache
            torch.cuda.empty_cache()
        return parts

    # Features

    def _read_features(
        self, train: Sequence[TokenSequence], held_out: Sequence[TokenSequence], tokens: torch.Tensor
    ) -> None:
        """Run the target over all sequences; keep what the head needs of it."""
        shared = self.work / "target.safetensors"
        if shared.exists():
            return
        with self._clock.phase("features"):
            longest = max(map(len, (*train, *held_out)))
            target = TargetModel(self.config, self.files, self.model, self.platform, longest, self.layers)
            try:
                self._read(target, held_out, self.work / "held_out", "reading held-out text", None)
                self._read(target, train, self.work / "train", "reading features", FEATURES_END)
                made = {"embeddings": target.embeddings().to(torch.bfloat16)}
                if (rows := target.head_rows(tokens.to(target.device))) is not None:
                    made["lm_head"] = rows
                save_file({name: value.cpu() for name, value in made.items()}, shared)
            finally:
                target.close()

    def _read(
        self, target: TargetModel, sequences: Sequence[TokenSequence], folder: Path, label: str, until: float | None
    ) -> None:
        writer = FeatureWriter(folder)
        done = writer.count
        with count_bar(label, len(sequences)) as show:
            for batch in target.batches(sequences[done:]):
                writer.add(target.read(batch), len(batch))
                done += len(batch)
                show(done)
                if until is not None and self._clock.passed(until):
                    self.note(f"time is up for features: {done} of {len(sequences)} sequences")
                    break
        writer.flush()

    # Training

    def _train(
        self,
        train: Sequence[TokenSequence],
        held_out: Sequence[TokenSequence],
        tokens: torch.Tensor,
        coverage: float,
        bar: Callable[[Trainer], AbstractContextManager[Show]] | None,
    ) -> DraftReport:
        settings, device = self.settings, self.platform.device
        room = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 0
        store = FeatureStore(self.work / "train", train, device, room)
        checks = FeatureStore(self.work / "held_out", held_out, device, room // 4)
        shared = load_file(self.work / "target.safetensors", device=str(device))
        table = shared["embeddings"]

        def embed(ids: torch.Tensor) -> torch.Tensor:
            return F.embedding(ids, table)

        shape = HeadShape.of_target(self.model, len(tokens), self.layers, settings.intermediate_size)
        head = DraftHead(shape, tokens)
        generator = torch.Generator().manual_seed(settings.train.seed)
        lm_head = shared.get("lm_head")
        head.begin(store.feature_scale().cpu(), None if lm_head is None else lm_head.cpu(), generator)
        head.to(device)
        plan = settings.train
        batch_tokens = plan.batch_tokens
        with self._clock.phase("measuring"):
            before = measure(head, checks, embed, plan.steps, batch_tokens)
        self.note(f"before: {described(before)}")
        if (left := self._clock.left) is not None:
            plan = dataclasses.replace(plan, seconds=max(1.0, left - RESERVED_SECONDS))
        trainer = Trainer(head, store, embed, plan)
        checkpoint = self.work / "checkpoint.pt"
        if checkpoint.exists():
            trainer.load(checkpoint)
            if plan.seconds is not None:  # the clock already counts what was trained before
                trainer.settings = dataclasses.replace(plan, seconds=plan.seconds + trainer.state.seconds)
            self.note(f"going on at step {trainer.state.step}")
        with self._clock.phase("training"):
            if bar is None:
                trainer.run(checkpoint=checkpoint)
            else:
                with bar(trainer) as show:
                    trainer.run(show, checkpoint)
        with self._clock.phase("measuring"):
            after = measure(head, checks, embed, plan.steps, batch_tokens)
        num_bytes = write_head(head, self.model, self.output, DTYPES[settings.dtype])
        state = trainer.state
        report = DraftReport(
            self.output, num_bytes, sum(p.numel() for p in head.parameters()), len(store), int(store.lengths().sum()),
            int(sum(each.learned.sum() for each in store.sequences)), len(checks), len(tokens), coverage, before,
            after, state.step, round(state.step * plan.epochs / max(1, trainer.total), 2),
            self._clock.seconds, state.losses,
        )  # fmt: skip
        (self.output / REPORT).write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        if not settings.keep_work:
            shutil.rmtree(self.work)
        return report


class _Clock:
    """Seconds of each phase, over all runs of the same work."""

    def __init__(self, path: Path, minutes: float | None) -> None:
        self._path = path
        self._limit = None if minutes is None else 60.0 * minutes
        self._begin = time.monotonic()
        self.seconds: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        self._before = sum(self.seconds.values())

    @property
    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._begin

    @property
    def left(self) -> float | None:
        """Seconds until the limit."""
        return None if self._limit is None else self._limit - self.elapsed

    def passed(self, share: float) -> bool:
        """Whether this share of the limit has passed."""
        return self._limit is not None and self.elapsed > share * self._limit

    def phase(self, name: str) -> _Phase:
        return _Phase(self, name)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 2)
        self._path.write_text(json.dumps(self.seconds))


class _Phase(AbstractContextManager["_Phase"]):
    def __init__(self, clock: _Clock, name: str) -> None:
        self._clock, self._name, self._begin = clock, name, time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._clock.add(self._name, time.monotonic() - self._begin)


def choose_tokens(
    sequences: Sequence[TokenSequence], vocab_size: int, count: int | None, always: Sequence[int] = ()
) -> tuple[np.ndarray, float]:
    """(the most frequent learned tokens in ascending order, the share of the learned ones that they are). `count`
    None: as many as cover 99 %. Those in `always` are among them."""
    seen = np.concatenate([each.tokens[each.learned] for each in sequences])
    counts = np.bincount(seen, minlength=vocab_size)[:vocab_size]
    ranks = counts.copy()
    ranks[[token for token in always if 0 <= token < vocab_size]] = len(seen) + 1
    order = np.argsort(-ranks, kind="stable")
    if count is None:
        share = np.cumsum(counts[order]) / len(seen)
        count = int(np.searchsorted(share, DEFAULT_COVERAGE)) + 1
        count = -(-count // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    chosen = np.sort(order[: min(count, vocab_size)]).astype(np.int64)
    return chosen, float(counts[chosen].sum() / len(seen))


def _coverages(sequences: Sequence[TokenSequence], vocab_size: int) -> str:
    """What other sizes of the draft vocabulary would cover."""
    sizes = [size for size in (1024, 2048, 4096, 8192, 16384, 32768) if size < vocab_size]
    return ", ".join(f"{size}: {choose_tokens(sequences, vocab_size, size)[1]:.1%}" for size in sizes) or "all tokens"


def described(found: HeldOutAcceptance) -> str:
    """Acceptance in one line."""
    shares = ", ".join(f"{share:.1%}" for share in found.by_position)
    return f"first 1 to {len(found.by_position)} drafts accepted: {shares}; {found.tokens_per_step:.2f} tokens a step"


def _extend(data: Data, more: Data) -> None:
    data.sequences += more.sequences
    data.prompts += more.prompts


def _split(items: list[Any], share: float, random: np.random.Generator) -> tuple[list[Any], list[Any]]:
    """(a share of the items, the others): at least one of each if there are two."""
    count = min(len(items) - 1, max(1, round(share * len(items)))) if len(items) > 1 else 0
    count = min(count, MOST_HELD_OUT)
    chosen = set(random.permutation(len(items))[:count].tolist())
    return (
        [item for index, item in enumerate(items) if index in chosen],
        [item for index, item in enumerate(items) if index not in chosen],
    )
