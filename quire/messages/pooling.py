"""`PoolingParams`: how a prompt is pooled into one vector. Names and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import msgspec

from quire.errors import ValidationError
from quire.messages.sampling import VllmFields, check_integer
from quire.vllm_arguments import POOLING, ForeignArgument

POOLINGS = ("last", "mean")
Task = Literal["embed", "classify"]
TASKS: tuple[Task, ...] = get_args(Task)

EXTRA = ("max_tokens_per_query", "max_tokens_per_doc")


class PoolingParams(msgspec.Struct, metaclass=VllmFields, omit_defaults=True):
    """One vector for a prompt, from the hidden states after the model's final norm: an embedding, or what a
    classifier's head makes of it."""

    foreign: ClassVar[Mapping[str, ForeignArgument]] = POOLING

    use_activation: bool | None = None
    """False: do not scale an embedding to length 1, and do not turn a classifier's numbers into probabilities."""
    dimensions: int | None = None
    """Keep this many leading numbers: for models trained for it (Matryoshka)."""
    task: str | None = None
    """"embed" or "classify". None: what the model does."""
    pooling: str | None = None
    """The last token's hidden state ("last") or the average over all ("mean"). None: the engine's default."""
    truncate_prompt_tokens: int | None = None
    """Keep this many leading tokens, and the end token if the text has one; -1: as many as the model takes."""
    normalize: bool | None = None
    """Older name of `use_activation`."""
    extra_kwargs: dict[str, Any] | None = None
    """Of `score`: `max_tokens_per_query` and `max_tokens_per_doc`, how many first tokens of each text are read."""
    activation: str = "unit"
    """What the vector goes through unless `use_activation` is False: "unit" (scaled to length 1), "softmax", "sigmoid"
    or "none". The engine sets it, by the model."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_counts()
        self._check_extra()
        if self.normalize is not None:
            if self.use_activation not in (None, self.normalize):
                raise ValidationError(
                    f"normalize ({self.normalize}) and use_activation ({self.use_activation}) are the same "
                    "parameter: give one of them",
                    "normalize",
                    self.normalize,
                )
            self.use_activation, self.normalize = self.normalize, None

    def clone(self) -> PoolingParams:
        """A copy that can be changed without touching this one; checked like a new one."""
        return msgspec.structs.replace(self)

    @property
    def is_activated(self) -> bool:
        """Whether `activation` is applied."""
        return self.use_activation is not False

    def _check_choices(self) -> None:
        for name in ("use_activation", "normalize"):
            if not isinstance(value := getattr(self, name), (bool, type(None))):
                raise ValidationError(f"{name} must be True, False or None, got {value!r}", name, value)
        if self.task not in (None, *TASKS):
            raise ValidationError(
                f"task must be {' or '.join(map(repr, TASKS))}, got {self.task!r}: nothing else is implemented", "task"
            )
        if self.pooling not in (None, *POOLINGS):
            raise ValidationError(f"pooling must be one of {', '.join(POOLINGS)}; got {self.pooling!r}", "pooling")

    def _check_extra(self) -> None:
        for name, count in (self.extra_kwargs or {}).items():
            if name not in EXTRA:
                raise ValidationError(f"extra_kwargs takes {' and '.join(EXTRA)}, not {name!r}", "extra_kwargs", name)
            check_integer(name, count, 0)

    def _check_counts(self) -> None:
        if self.dimensions is not None and not _is_integer(self.dimensions, 1):
            raise ValidationError(
                f"dimensions must be an integer of at least 1, got {self.dimensions!r}", "dimensions", self.dimensions
            )
        keep = self.truncate_prompt_tokens
        if keep is not None and not (_is_integer(keep, -1) and keep):
            raise ValidationError(
                f"truncate_prompt_tokens must be -1 or at least 1, got {keep!r}", "truncate_prompt_tokens", keep
            )
        if keep is not None:
            check_integer("truncate_prompt_tokens", keep, -1)


def with_task(params: PoolingParams, task: str | None) -> PoolingParams:
    """The parameters for this task; raises if they name another."""
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise ValidationError(f"task is {params.task!r}, and {task!r} is asked for", "task", params.task)
    made: PoolingParams = msgspec.structs.replace(params, task=task)
    return made


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
