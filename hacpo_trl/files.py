"""Names of the files that a run writes: its output folder and its checkpoints.

output_dir/
├── qwen/, llama/           each agent, for `from_pretrained` (`save_model`)
├── completions/            `log_completions`: a parquet file a log
├── NON_FINITE/             rows of the update that ended the run, if one did
└── checkpoint-40/
    ├── qwen/               the agent: config.json, model.safetensors, tokenizer files, AGENT_SETTINGS, README.md;
    │                       and what resuming needs: optimizer.pt, scheduler.pt, or shards of ZeRO and FSDP
    ├── llama/              the same
    ├── LAUNCH_STATE        how the run was launched
    ├── RUN_STATE           what the run knows beside weights and optimizers
    ├── PROCESS_STATE       for each process what it still has to train on
    ├── SETTINGS            the run's settings, without tokens
    ├── trainer_state.json, rng_state.pth
    └── MANIFEST            sizes and hashes of all others, written last

Hidden in output_dir: INCOMPLETE, where checkpoints are written until they are complete; LOCK, held by the run that
writes there; UPLOADS, what is on its way to the Hub.
"""

from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME


SETTINGS = "training_args.json"
LAUNCH_STATE = "launch.json"
RUN_STATE = "hacpo_state.json"
PROCESS_STATE = "hacpo_process_{}.pt"
AGENT_SETTINGS = "hacpo_agent.json"
COMPLETIONS = "completions"
MANIFEST = "manifest.json"
INCOMPLETE = ".incomplete"
LOCK = ".lock"
UPLOADS = ".uploads"
NON_FINITE = "non_finite"

# Patterns of what only a resumed run needs in an agent's folder; it does not belong into a model repository.
RESUME_ONLY = [
    *(OPTIMIZER_NAME, SCHEDULER_NAME),
    *("global_step*", "latest", "zero_to_*.py", "*_states.pt"),
    *("optimizer_0*", "optimizer.bin", "pytorch_model_fsdp*"),
]
