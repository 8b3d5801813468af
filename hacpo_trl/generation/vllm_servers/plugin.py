"""Entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""

GLOO_BACKEND = "hacpo_gloo"


def register():
    """Adds the gloo engine to those that `--weight-transfer-config` can name."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM may load plugins several times in one process.
    if GLOO_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            GLOO_BACKEND, "hacpo_trl.generation.vllm_servers.gloo_engine", "GlooWeightTransferEngine"
        )
