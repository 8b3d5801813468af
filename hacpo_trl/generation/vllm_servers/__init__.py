"""Generation by vLLM servers, one an agent.

    trainer process                                    vLLM server of one agent
    ───────────────                                    ────────────────────────
    generation.py   asks all servers at once   ─HTTP─▶ OpenAI API
    weights.py      gathers what is trained
    client.py       sends it, within limits    ─HTTP─▶ weight-transfer endpoints
    transfer.py     broadcast by gloo or NCCL  ══════▶ gloo_engine.py (a plugin of ours) or vLLM's NCCL engine

The plugin (`plugin.py`) is all that a server's environment needs of this package, and it needs nothing but torch and
vLLM. `hacpo serve` starts the servers that a recipe asks for.
"""
