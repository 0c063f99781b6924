"""What config.json says about the head of a classifier (`…ForSequenceClassification`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import UnsupportedModelError, ValidationError
from quire.loading.files import ModelFiles

CLASSIFIES = "ForSequenceClassification"
MOST_CLASSES = 1 << 20
FROM_TOKENS = "classifier_from_token"
"""The field that makes a classifier of a language model: its tokens that stand for classes."""
_METHODS = ("from_2_way_softmax", "no_post_processing")

Activation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True)
class ClassHeadConfig:
    """The classes of a model, and how its numbers become probabilities."""

    labels: tuple[str | None, ...]
    activation: Activation
    separates: bool = True
    """Whether a pair of texts has the tokenizer's separators; otherwise one text follows the other."""
    tokens: tuple[int, ...] = ()
    """The head is made of these tokens' rows of the LM head; none: the checkpoint has it."""
    is_difference: bool = False
    """The only class is the second token's row less the first's."""

    @property
    def count(self) -> int:
        """How many classes there are."""
        return len(self.labels)

    @property
    def scores_pairs(self) -> bool:
        """One number for a text: of a query with a document, it is their score."""
        return self.count == 1


def architecture_of(named: str, raw: Mapping[str, Any]) -> str:
    """The architecture that config.json names, or the classifier that is to be made of it (`is_classifier`)."""
    if not raw.get("is_classifier") or named.endswith(CLASSIFIES):
        return named
    for end in ("ForCausalLM", "LMHeadModel"):
        if named.endswith(end):
            return named.removesuffix(end) + CLASSIFIES
    raise UnsupportedModelError(f"no classifier is made of {named}: its name ends with ForCausalLM otherwise")


def class_head_of(architecture: str, raw: Mapping[str, Any]) -> ClassHeadConfig | None:
    """The head that a config describes; None: the model is no classifier."""
    if not architecture.endswith(CLASSIFIES):
        return None
    tokens, method = raw.get(FROM_TOKENS) or (), _method(raw)
    is_difference = method == _METHODS[0]
    if method is None:
        tokens = ()
    elif not (isinstance(tokens, (list, tuple)) and all(isinstance(token, int) for token in tokens) and tokens):
        raise ValidationError(f"{FROM_TOKENS} must list tokens, got {tokens!r}", FROM_TOKENS, tokens)
    elif is_difference and len(tokens) != 2:
        raise ValidationError(
            f"{FROM_TOKENS} must list two tokens, for no and for yes, got {tokens!r}", FROM_TOKENS, tokens
        )
    count = 1 if is_difference else len(tokens) or _count(raw)
    separates = raw.get("use_sep_token", raw.get("use_pad_token"))
    return ClassHeadConfig(
        labels=_labels(raw, count),
        activation=_activation(raw, count),
        separates=not tokens if separates is None else bool(separates),
        tokens=tuple(tokens),
        is_difference=is_difference,
    )


def with_token_ids(files: ModelFiles, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config with ids in place of the texts of tokens that stand for classes."""
    given = raw.get(FROM_TOKENS)
    if not (isinstance(given, (list, tuple)) and any(isinstance(token, str) for token in given)):
        return dict(raw)
    path = files.path / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModelError(f"{FROM_TOKENS}={given!r} needs tokenizer.json in the model's folder: give ids")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    ids = [tokenizer.token_to_id(token) if isinstance(token, str) else token for token in given]
    if None in ids:
        raise ValidationError(f"{given[ids.index(None)]!r} is no token of the model", FROM_TOKENS, given)
    return {**raw, FROM_TOKENS: ids}


def _method(raw: Mapping[str, Any]) -> str | None:
    method = raw.get("method") or (_METHODS[0] if raw.get("is_original_qwen3_reranker") else None)
    if method is not None and method not in _METHODS:
        raise UnsupportedModelError(f"method {method!r} is not implemented; only {' and '.join(_METHODS)} are")
    return method


def _count(raw: Mapping[str, Any]) -> int:
    """As transformers: `num_labels`, or as many as there are labels, or two."""
    count = raw.get("num_labels") or len(raw.get("id2label") or ()) or 2
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MOST_CLASSES:
        raise ValidationError(f"the model's config has num_labels = {count!r}", "num_labels", count)
    return count


def _labels(raw: Mapping[str, Any], count: int) -> tuple[str | None, ...]:
    names = raw.get("id2label")
    names = {str(number): name for number, name in names.items()} if isinstance(names, Mapping) else {}
    found = [names.get(str(number)) for number in range(count)]
    return tuple(name if isinstance(name, str) else f"LABEL_{number}" for number, name in enumerate(found))


def _activation(raw: Mapping[str, Any], count: int) -> Activation:
    """vLLM's: by the kind of problem, else the function that sentence-transformers names, else by the classes."""
    kind = raw.get("problem_type")
    if kind in ("regression", "multi_label_classification"):
        return "none" if kind == "regression" else "sigmoid"
    settings = raw.get("sentence_transformers")
    named = settings.get("activation_fn") if isinstance(settings, Mapping) else None
    named = named or raw.get("sbert_ce_default_activation_function")
    if named is None or kind is not None:
        return "sigmoid" if count == 1 else "softmax"
    name = str(named).rpartition(".")[2]
    if name == "Identity":
        return "none"
    if name not in ("Sigmoid", "Softmax"):
        raise UnsupportedModelError(f"the activation {named!r} of scores is not implemented; Sigmoid and Identity are")
    return "sigmoid" if count == 1 else "softmax"
