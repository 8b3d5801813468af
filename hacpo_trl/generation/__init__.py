"""How agents answer prompts: `backend.py` says what a backend is, `choice.py` which one a run takes.

They are transformers' `generate`, colocated vLLM engines, and `vllm_servers/`. May use agents and what is below them.
"""
