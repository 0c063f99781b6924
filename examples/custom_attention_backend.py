"""A custom attention backend: row by row, as in a textbook."""

import torch

from quire import LLM, SamplingParams


class TextbookAttention:
    """Gathers the keys and values of each row from its blocks, then softmax(q·kᵀ)·v."""

    graph_safe = False  # it asks the device how long each row is, which a captured graph cannot

    def prepare(self, heads, kv, inputs, spec): ...  # before a layer's keys are written; nothing to work out ahead

    def attend(self, q, kv, inputs, spec):
        assert spec.sinks is None and spec.soft_cap is None, "not in this textbook"
        out, group = torch.empty_like(q), q.shape[1] // kv.shape[2]  # `group` query heads share a KV head
        for row in range(inputs.num_rows):
            begin, end = inputs.query_starts[row : row + 2].tolist()
            past = (context := int(inputs.context_lens[row])) - (end - begin)
            blocks = inputs.own_tables(-(-context // kv.shape[3]))[row].long()  # the last one may be part full
            keys, values = kv[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].repeat_interleave(group, 1)
            seen = q.new_ones(end - begin, context).tril(past).triu(past + 1 - (spec.window or context))
            scores = q[begin:end].transpose(0, 1) @ keys.transpose(-1, -2) * spec.scale
            out[begin:end] = (scores.masked_fill(seen == 0, -torch.inf).softmax(-1) @ values).transpose(0, 1)
        return out.flatten(1)


def main(max_tokens: int = 8, **settings) -> list[str]:
    texts = []
    for backend in ("torch", f"{__name__}.TextbookAttention"):
        with LLM(attention_backend=backend, **settings) as llm:
            (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=max_tokens))
        texts.append(output.outputs[0].text)
        print(f"{backend}: {texts[-1]!r}")
    return texts


if __name__ == "__main__":
    main()
