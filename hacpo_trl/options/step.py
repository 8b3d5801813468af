"""The arithmetic of one step: how many rollouts there are, and how they are cut into optimizer updates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepPlan:
    """How one step's rollouts are cut into optimizer updates.

    Attributes:
        prompts: B, prompts of one step over all processes.
        rows_per_prompt: Rollouts of one prompt that a learner sees: nG, or G for algorithms that share nothing.
        rows_per_update: Rollouts of one optimizer update of an agent, over all processes and accumulation steps.
        updates: U, optimizer updates of one step.
    """

    prompts: int
    rows_per_prompt: int
    rows_per_update: int
    updates: int


def plan_step(
    num_agents: int,
    processes: int,
    shares: bool,
    prompts_per_step: int | None,
    num_generations: int,
    per_device_train_batch_size: int,
    gradient_accumulation_steps: int,
) -> StepPlan:
    """The plan for n agents.

    Args:
        num_agents: n.
        processes: Over how many processes a step is dealt.
        shares: Whether learners get their peers' rollouts.
        prompts_per_step: See `HACPOConfig`, like what follows.
        num_generations: G.
        per_device_train_batch_size: Rollouts of one micro-batch.
        gradient_accumulation_steps: Micro-batches of one update.

    Raises:
        ValueError: if it does not come out even; it says which numbers would work.
    """
    rows_per_prompt = num_generations * (num_agents if shares else 1)
    per_update = per_device_train_batch_size * gradient_accumulation_steps * processes
    product = (
        f"per_device_train_batch_size {per_device_train_batch_size} x gradient_accumulation_steps "
        f"{gradient_accumulation_steps} x {processes} processes"
    )
    prompts = prompts_per_step
    if prompts is None:
        if per_update % num_generations or (per_update // num_generations) % processes:
            raise ValueError(
                f"One update takes {per_update} rollouts ({product}), which are no whole number of prompts of "
                f"num_generations={num_generations} on each process. Make it a multiple of "
                f"{num_generations * processes}, or set prompts_per_step."
            )
        prompts = per_update // num_generations
    rows = prompts * rows_per_prompt
    if prompts % processes or rows % per_update:
        working_prompts = [
            b
            for b in range(processes, 2 * prompts + per_update + 1, processes)
            if b * rows_per_prompt % per_update == 0
        ]
        near = sorted(sorted(working_prompts, key=lambda b: abs(b - prompts))[:2])
        work = f"prompts_per_step {' or '.join(map(str, near))}"
        if prompts % processes:
            raise ValueError(
                f"prompts_per_step={prompts} cannot be dealt to {processes} processes. What would work: {work}."
            )
        unit = per_device_train_batch_size * processes
        accumulation = [a for a in range(1, rows // unit + 1) if rows % (a * unit) == 0]
        raise ValueError(
            f"A step gives each agent {rows} rollouts (prompts_per_step {prompts} x {rows_per_prompt} a prompt), "
            f"which do not divide into updates of {per_update} ({product}). What would work: {work}"
            + (f"; or gradient_accumulation_steps {', '.join(map(str, accumulation))}." if accumulation else ".")
        )
    return StepPlan(prompts, rows_per_prompt, per_update, rows // per_update)
