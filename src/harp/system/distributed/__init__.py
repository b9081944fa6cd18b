"""Several processes that work together: their ranks, the launcher that starts them, and their communication."""

__all__ = ["affinity", "collectives", "environment", "fabric", "launcher", "peers", "shared_noise", "sync_batchnorm"]
