"""What is wrong with a plan, for the person who wrote it."""


class PlanError(Exception):
    """The plan is wrong: what, where, what was expected, what to do."""
