"""POST /tokenize and /detokenize."""

from __future__ import annotations

import json

from quire.server.chat_generation import render
from quire.server.context import ServerContext
from quire.server.errors import bad_request, not_found
from quire.server.http import Exchange
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from quire.server.routing import Route


async def tokenize(context: ServerContext, exchange: Exchange) -> None:
    """Tokenize text or a conversation that fits the model."""
    request = await exchange.read_json(TokenizeRequest)
    context.check_model(exchange, request.model)
    is_long = request.tools is not None or request.chat_template is not None
    has_media = any(message.has_media for message in request.messages or ())
    await exchange.reply(await exchange.work(_tokenized, context, request, is_long=is_long, has_media=has_media))


def _tokenized(context: ServerContext, request: TokenizeRequest) -> TokenizeResponse:
    request.check_fields()
    if request.prompt is not None:
        tokens = context.tokenize(request.prompt, request.add_special_tokens is not False)
    else:
        tokens = render(context, _as_chat(request))[1]
    if len(tokens) > context.max_model_len:
        context.check_length(len(tokens), None)
    names = list(context.tokenizer.convert_ids_to_tokens(tokens)) if request.return_token_strs else None
    return TokenizeResponse(len(tokens), context.max_model_len, tokens, names)


def _as_chat(request: TokenizeRequest) -> ChatRequest:
    return ChatRequest(
        messages=request.messages or [],
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        mm_processor_kwargs=request.mm_processor_kwargs,
        add_special_tokens=request.add_special_tokens,
    )


async def detokenize(context: ServerContext, exchange: Exchange) -> None:
    """Convert token ids, as many as the model reads, to text, including special tokens."""
    request = await exchange.read_json(DetokenizeRequest)
    context.check_model(exchange, request.model)
    await exchange.reply(DetokenizeResponse(await exchange.work(_text, context, request.tokens)))


def _text(context: ServerContext, tokens: list[int]) -> str:
    if context.tokenizer is None:
        raise bad_request("there is no tokenizer: the server runs with --skip-tokenizer-init")
    most, vocabulary = context.max_model_len, context.llm.info.model.vocab_size
    if len(tokens) > most:
        raise bad_request(f"tokens holds {len(tokens)}; this model's maximum context length is {most}", "tokens")
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
        bad = next(token for token in tokens if not 0 <= token < vocabulary)
        raise bad_request(f"token id {bad} is outside the vocabulary of {vocabulary}", "tokens")
    return context.texts.decode(tokens)


async def tokenizer_info(context: ServerContext, exchange: Exchange) -> None:
    """The tokenizer's class and settings, without names of files."""
    if not context.config.enable_tokenizer_info_endpoint or context.tokenizer is None:
        raise not_found("/tokenizer_info is not served here")
    tokenizer = context.tokenizer
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if not name.endswith(_FILE_NAMES)}
    settings |= tokenizer.special_tokens_map
    settings |= {"tokenizer_class": type(tokenizer).__name__, "chat_template": tokenizer.chat_template}
    await exchange.reply(json.dumps(settings, default=str).encode())


_FILE_NAMES = ("_file", "_path", "_or_path", "_dir")

ROUTES = [
    Route("GET", "/tokenizer_info", tokenizer_info, answer=dict, errors=(404,)),
    Route("POST", "/tokenize", tokenize, body=TokenizeRequest, answer=TokenizeResponse),
    Route("POST", "/detokenize", detokenize, body=DetokenizeRequest, answer=DetokenizeResponse),
]
