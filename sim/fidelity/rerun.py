"""A measured run again, on one simulated replica: the engine's scheduler and cache, a step-time model."""

from replica.sequence import Sequence
from sim.event_queue import EventQueue
from sim.fidelity.measured_run import MeasuredRun
from sim.outcome import Outcome
from sim.simulated_replica import ReplicaEvents, ReplicaSettings, SimulatedReplica
from sim.step_time.step_time import StepTime

MAX_MODEL_LEN = 1 << 20


def rerun(run: MeasuredRun, step_time: StepTime, kv_tokens: int) -> list[Outcome]:
    """What became of the run's requests with ``step_time``, in the same order.

    Every block gets a name of its own: nothing was cached in the measured runs (their prompts differ).
    """
    size = run.block_tokens
    queue = EventQueue()
    first_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    settings = ReplicaSettings(
        capacity_tokens=kv_tokens,
        max_batched_tokens=run.max_batched_tokens,
        max_running=run.max_running,
        max_model_len=MAX_MODEL_LEN,
    )
    replica = SimulatedReplica(
        settings.scheduler(size),
        step_time,
        queue,
        ReplicaEvents(
            lambda sequence: first_s.update({sequence.request_id: queue.now}),
            lambda sequence: last_s.update({sequence.request_id: queue.now}),
            lambda sequence: None,
        ),
    )
    next_id = 0
    for number, outcome in enumerate(run.outcomes):
        blocks = outcome.prompt_tokens // size
        sequence = Sequence.of_blocks(
            str(number),
            range(next_id, next_id + blocks),
            outcome.prompt_tokens,
            outcome.output_tokens,
            block_size=size,
        )
        next_id += blocks
        queue.at(outcome.sent_s, replica.accept, sequence)
    queue.run()
    return [
        Outcome(
            sent_s=outcome.sent_s,
            prompt_tokens=outcome.prompt_tokens,
            output_tokens=outcome.output_tokens,
            cached_tokens=0,
            ttft_s=first_s[str(number)] - outcome.sent_s if str(number) in first_s else None,
            e2e_s=last_s.get(str(number), queue.now) - outcome.sent_s,
            replica=0,
            error=None if str(number) in last_s else "too long for the replica",
        )
        for number, outcome in enumerate(run.outcomes)
    ]
