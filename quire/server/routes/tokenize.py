"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from quire.server.chat_generation import render
from quire.server.context import LONG_TEXT, ServerContext
from quire.server.errors import bad_request
from quire.server.http import Exchange
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from quire.server.routing import Route


async def tokenize(context: ServerContext, exchange: Exchange) -> None:
    """Tokenize text or a conversation."""
    request = await exchange.read_json(TokenizeRequest)
    context.check_model(request.model)
    request.check_fields()
    if request.prompt is not None:
        tokens = await context.tokenize(request.prompt, request.add_special_tokens is not False)
    else:
        if request.add_special_tokens:
            raise bad_request("add_special_tokens is not supported for messages: the template adds them")
        tokens = (await render(context, _as_chat(request)))[1]
    names = None
    if request.return_token_strs:
        names = list(context.tokenizer.convert_ids_to_tokens(tokens))
    await exchange.reply(TokenizeResponse(len(tokens), context.max_model_len, tokens, names))


def _as_chat(request: TokenizeRequest) -> ChatRequest:
    return ChatRequest(
        messages=request.messages or [],
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
    )


async def detokenize(context: ServerContext, exchange: Exchange) -> None:
    """Convert token ids to text, including special tokens."""
    request = await exchange.read_json(DetokenizeRequest)
    context.check_model(request.model)
    if context.tokenizer is None:
        raise bad_request("there is no tokenizer: the server runs with --skip-tokenizer-init")
    vocabulary = context.llm.info.model.vocab_size
    if bad := [token for token in request.tokens if not 0 <= token < vocabulary]:
        raise bad_request(f"token id {bad[0]} is outside the vocabulary of {vocabulary}", "tokens")
    if len(request.tokens) < LONG_TEXT:
        text = context.tokenizer.decode(request.tokens)
    else:
        text = await asyncio.to_thread(context.tokenizer.decode, request.tokens)
    await exchange.reply(DetokenizeResponse(text))


ROUTES = [
    Route("POST", "/tokenize", tokenize, body=TokenizeRequest, answer=TokenizeResponse),
    Route("POST", "/detokenize", detokenize, body=DetokenizeRequest, answer=DetokenizeResponse),
]
