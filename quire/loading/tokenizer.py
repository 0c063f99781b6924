"""The model's tokenizer, as a transformers tokenizer object."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import CheckpointError, ModelNotFoundError, QuireError, UnsupportedModelError
from quire.loading.files import ModelFiles, local_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from quire.config import EngineConfig

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def import_without_torch() -> None:
    """Import transformers for its tokenizers only, as if torch were not installed: it would import torch with its
    compilers, two thirds of a server's start time. Torch can still be imported afterwards."""
    if not {"torch", "transformers"}.isdisjoint(sys.modules):
        return
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # transformers would warn that torch is missing
    before = os.environ.get(quiet)
    os.environ[quiet] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment] # makes `import torch` fail
    try:
        import transformers  # noqa: F401
    finally:
        del sys.modules["torch"]
        del os.environ[quiet]
        if before is not None:
            os.environ[quiet] = before


def load_tokenizer(
    files: ModelFiles | str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    spares_torch: bool = False,
) -> PreTrainedTokenizerFast:
    """The tokenizer of a model: from its folder, or from a GGUF file's own metadata.

    A name that is not on this machine is looked up like a model's. Code in the model's folder runs only with
    `trust_remote_code`. `spares_torch`: this process needs transformers only for tokenizers.
    """
    if spares_torch and not trust_remote_code:
        import_without_torch()
    if not isinstance(files, ModelFiles):
        files = _find(files, revision, trust_remote_code)
    if any(files.file(name) for name in _TOKENIZER_FILES):
        return _from_folder(files, trust_remote_code)
    if files.gguf is not None:
        return _from_gguf(files.gguf)
    raise ModelNotFoundError(f"{files.path} has no tokenizer (looked for {', '.join(_TOKENIZER_FILES)})")


def tokenizer_of(config: EngineConfig, files: ModelFiles, *, spares_torch: bool = False) -> PreTrainedTokenizerFast:
    """The configured tokenizer: the model's own, unless the settings name another."""
    return load_tokenizer(
        files if config.tokenizer is None else config.tokenizer,
        trust_remote_code=config.trust_remote_code,
        revision=config.tokenizer_revision,
        spares_torch=spares_torch,
    )


def _find(name: str | os.PathLike[str], revision: str | None, code: bool) -> ModelFiles:
    path = Path(name).expanduser()
    if path.is_dir() and any((path / file).is_file() for file in _TOKENIZER_FILES):
        return ModelFiles(str(name), path, folder=path)  # A tokenizer's folder need not contain a model.
    if path.exists():
        return local_files(str(name), path)
    from quire.loading.hub import resolve

    return resolve(str(name), revision=revision, trust_remote_code=code)


def _from_folder(files: ModelFiles, trust_remote_code: bool) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(  # type: ignore[return-value]
            files.folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except QuireError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"the tokenizer in {files.folder} runs its own code; "
                "allow it with trust_remote_code if you trust its author"
            ) from error
        what = "tokenizer" if (wrong := _config_error(files, trust_remote_code)) is None else "config"
        raise CheckpointError(f"the {what} in {files.folder} cannot be loaded: {wrong or error}") from error


def _config_error(files: ModelFiles, trust_remote_code: bool) -> Exception | None:
    """Why transformers refuses the model's config, which it reads to find the tokenizer's class; None: it does not, or
    only because the config has code of its own."""
    from transformers import AutoConfig

    path = files.file("config.json")
    if path is None:
        return None
    try:
        # Not None, with which it asks at the terminal whether to run the code.
        AutoConfig.from_pretrained(path.parent, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        return None if "trust_remote_code" in str(error) else error
    return None


def _from_gguf(path: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    from quire.loading.gguf_header import read_header
    from quire.loading.gguf_tokenizer import adds_bos_eos, special_token, tokenizer_from_gguf, tokens_of

    header = read_header(path)
    tokens = tokens_of(header)
    backend = tokenizer_from_gguf(header, tokens)
    add_bos, add_eos = adds_bos_eos(header)
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {key: special_token(header, tokens, role) for key, role in roles.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_NotCopied(backend),
        chat_template=header.text("tokenizer.chat_template"),
        add_bos_token=add_bos,
        add_eos_token=add_eos,
        clean_up_tokenization_spaces=False,
        model_max_length=header.integer(f"{header.architecture}.context_length", int(1e30)),
        **{key: token for key, token in named.items() if token is not None},
    )
    tokenizer.name_or_path = str(path)
    return tokenizer


class _NotCopied:
    """Keeps transformers from copying the tokenizer through JSON, which takes a third of the time to build it."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: dict[int, object]) -> Tokenizer:
        return self._backend
