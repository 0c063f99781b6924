"""A conversation that is suspended, resumed in another engine, and forked. Resuming computes one token."""

import tempfile

from quire import LLM, SamplingParams


def main(max_tokens: int = 24, **settings) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        tiers = {"swap_space": 0.25, "kv_disk": folder, "kv_disk_size": 1}  # GiB of host memory, a folder, GiB there
        with LLM(**settings, **tiers) as llm:
            session = llm.sessions.create("agent-7", "Once upon a time there was a lighthouse keeper who")
            print(f"agent-7:  {session.generate(params).outputs[0].text!r}")
            info = session.suspend()
            print(f"{info.phase}: {info.num_tokens} tokens, {info.device_tokens} on the device")

        with LLM(**settings, **tiers) as llm:  # as after a restart
            session = llm.sessions.resume("agent-7")
            other = session.fork("agent-7b")
            other.append(" Then came the storm.")
            for name, which in (("agent-7: ", session), ("agent-7b:", other)):
                output = which.generate(params)
                prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
                print(f"{name} {output.outputs[0].text!r}")
                print(f"  {prompt - cached} of {prompt} tokens had to be computed")


if __name__ == "__main__":
    main()
