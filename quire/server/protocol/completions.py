"""/v1/completions."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.errors import bad_request
from quire.server.protocol.chat import PromptLogprob
from quire.server.protocol.common import RequestTimings, Usage, prompt_list
from quire.server.protocol.sampling import GenerationFields
from quire.server.protocol.values import Logprobs, Prompt, PromptEmbeds, WithinContext

MAX_TOKENS = 16
"""OpenAI's default."""


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of /v1/completions."""

    prompt: Prompt | None = None
    """Text, token ids, or a list of either. Required without prompt_embeds."""
    max_tokens: WithinContext | None = None
    """0 with echo: score the prompt only."""
    logprobs: Logprobs | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None
    """Text after what is generated, for models that can fill in the middle."""
    prompt_embeds: PromptEmbeds | None = None
    """Prompts as embeddings, before those of `prompt`: tensors as torch.save writes them, in base64."""

    @property
    def client_names(self) -> Mapping[str, str]:
        return {"prompt_token_ids": "prompt", **super().client_names}

    def check_fields(self) -> None:
        """Check what the types cannot express; raises 400."""
        super().check_fields()
        if self.embeds:
            self._check_beside_embeds()
        elif self.prompt is None:
            raise bad_request("the body has no prompt, which is required", "prompt")
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens is 0, which needs echo: without it the response would be empty", "max_tokens")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise bad_request(f"max_tokens must be at least 0, got {self.max_tokens}", "max_tokens")
        if self.logprob_token_ids and self.logprobs is None:
            raise bad_request("logprob_token_ids needs logprobs", "logprob_token_ids")
        if self.logprob_token_ids and self.echo:
            raise bad_request("logprob_token_ids are of the output's positions: leave out echo", "logprob_token_ids")
        if self.logprobs is not None and self.logprobs < 0:
            raise bad_request(f"logprobs must be at least 0, got {self.logprobs}", "logprobs")
        if self.use_beam_search and self.logprobs:
            raise bad_request("beam search returns logprobs of the chosen tokens only: logprobs must be 0", "logprobs")
        if self.use_beam_search and self.echo and self.logprobs is not None:
            raise bad_request("beam search does not score its prompt: leave out echo or logprobs", "echo")

        if self.suffix and self.echo:
            for name in ("logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
                if getattr(self, name) is not None:
                    raise bad_request(f"suffix and echo cannot be combined with {name}", name)

    def _check_beside_embeds(self) -> None:
        """Refuse what needs the tokens of a prompt: embeddings have none."""
        for name in ("echo", "prompt_logprobs", "suffix", "truncate_prompt_tokens", "session_id"):
            if getattr(self, name) not in (None, False, ""):
                raise bad_request(f"prompt_embeds cannot be combined with {name}", name)

    @property
    def embeds(self) -> list[str]:
        """The prompts that are given as embeddings."""
        given = self.prompt_embeds or []
        return [given] if isinstance(given, str) else given

    @property
    def prompts(self) -> list[str | list[int]]:
        """The other prompts, as a list."""
        if self.embeds and not self.prompt:  # clients send an empty one, where the field is required
            return []
        return prompt_list(self.prompt or [], "prompt")


class CompletionLogprobs(msgspec.Struct):
    """Columns with one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(msgspec.Struct, omit_defaults=True):
    """One sequence, or its new output."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType | None = UNSET


class CompletionResponse(msgspec.Struct, omit_defaults=True):
    """The whole response, or one event of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: UnsetType | None = UNSET
    system_fingerprint: UnsetType | None = UNSET
    kv_transfer_params: UnsetType | None = UNSET
    metrics: RequestTimings | list[RequestTimings] | UnsetType = UNSET
