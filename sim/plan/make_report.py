"""From a plan to its report: one function per kind."""

from sim.plan.api_bill import plan_api_bill
from sim.plan.arithmetic import plan_arithmetic
from sim.plan.config import (
    ApiBillPlan,
    ArithmeticPlan,
    ConversationPlan,
    HybridPlan,
    LongPromptsPlan,
    MemoryPlan,
    OfflinePlan,
    OnlinePlan,
    PlanConfig,
    TiersPlan,
)
from sim.plan.conversation import plan_conversation
from sim.plan.hybrid import plan_hybrid
from sim.plan.long_prompts import plan_long_prompts
from sim.plan.memory import plan_memory
from sim.plan.offline import plan_offline
from sim.plan.online import plan_online
from sim.plan.tiers import plan_tiers
from sim.plan.worksheet import Report
from sim.simulate import Progress


def make_report(plan: PlanConfig, *, simulated: bool = True, progress: Progress | None = None) -> Report:
    """The finished plan; with ``simulated`` the answer is tried where there is something to try.

    Memory, tiers, hybrid, the API bill and a sheet have nothing to try: they replay a trace exactly, or are
    exact.
    Raises ``PlanError`` when the plan cannot be calculated as it stands.
    """
    match plan:
        case OnlinePlan():
            return plan_online(plan, simulated=simulated, progress=progress)
        case LongPromptsPlan():
            return plan_long_prompts(plan, simulated=simulated, progress=progress)
        case OfflinePlan():
            return plan_offline(plan, simulated=simulated)
        case ConversationPlan():
            return plan_conversation(plan, simulated=simulated)
        case MemoryPlan():
            return plan_memory(plan)
        case TiersPlan():
            return plan_tiers(plan)
        case HybridPlan():
            return plan_hybrid(plan)
        case ApiBillPlan():
            return plan_api_bill(plan)
        case ArithmeticPlan():
            return plan_arithmetic(plan)
