"""Our own trainer's habits, with where they are written; those of others are in rules/facts/trainers.py."""

from __future__ import annotations

from phalanx.rules.facts.trainers import Practice

# Read in the code on 2026-11-15; each source names the page that describes it, and the page the file.
PHALANX = Practice(
    trainer="phalanx",
    loss_scale="dynamic",
    token_weighted_loss=True,
    fp8_spares_sensitive=True,
    skips_together=True,
    error_feedback=True,
    checkpoint_format="safetensors",
    atomic_commit=True,
    verifies_digests=True,
    resumes_exactly=("weights", "moments", "scheduler", "scaler", "rng", "sampler", "tokens", "layout"),
    heartbeat_s=0.25,
    memory_copies="other rack",
    preflight=True,
    step_transaction=True,
    bounded_restarts=3,
    telemetry=("utilization", "memory", "peers", "noise", "energy", "steps"),
    listens=("127.0.0.1",),
    authenticated=True,
    sources={
        "loss_scale": "docs/optimizers.md; train/optim/scaler.py: dynamic in fp16, none in other formats",
        "token_weighted_loss": "docs/telemetry.md; train/engine.py: summed loss over the valid tokens of the batch",
        "fp8_spares_sensitive": "train/parallel/float8.py: linears of the blocks alone; head, embedding, norms and "
        "router (fp32, train/models/moe.py) are not",
        "skips_together": "docs/recovery.md; train/engine.py: every rank decides on the same summed norm",
        "error_feedback": "docs/decisions/0013-gradient-compression.md; train/parallel/compress.py",
        "checkpoint_format": "docs/checkpoints.md: safetensors and JSON, never code",
        "atomic_commit": "docs/checkpoints.md: what counts as saved",
        "verifies_digests": "docs/checkpoints.md: all boxes are verified before a number changes",
        "resumes_exactly": "docs/checkpoints.md: what is remembered; train/state/training_state.py",
        "heartbeat_s": "docs/recovery.md; rank to agent 0.1 s (elastic/rank_link.py), agent to coordinator 0.25 s "
        "(elastic/host_agent.py)",
        "memory_copies": "docs/vault.md: on another host, and rack if there are two; else with the agent's process",
        "preflight": "docs/security.md: before a host takes part, and before every later formation",
        "step_transaction": "docs/recovery.md, docs/checkpoints.md: epochs, and the fence of a commit",
        "bounded_restarts": "docs/recovery.md: fault.restarts",
        "telemetry": "docs/telemetry.md: every series",
        "listens": "docs/security.md: where it listens; loopback on one machine, fault.interface with several hosts",
        "authenticated": "docs/security.md: HMAC-SHA256 of a secret per launch, both ways; torch's store and the "
        "collectives are torch's own and are not",
    },
)
