"""Runs a batch through the model: index tensors, forward pass, logits of the rows that sample."""

import torch

from replica.batch import Batch, Work
from replica.kv_cache.state_checkpoints import StateCheckpoints
from replica.model.decoder import Decoder
from replica.model.linear_attention import StateMemory
from replica.model.load import LoadedModel
from replica.model.paged_kv import PagedKv
from replica.model.step_plan import StepPlan, plan_step


class NotFinite(ArithmeticError):
    """The model computed NaN or infinity for a row of the batch."""


class ModelRunner:
    """A model and the memory of its KV blocks. Use it from one thread."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        blocks: int,
        block_size: int,
        batch_invariant: bool = False,
        kv_int8: bool = False,
        states: StateCheckpoints | None = None,
    ) -> None:
        """``states`` says which slot is whose; required for a model with recurrent layers."""
        dtype = model.weights.embedding.dtype
        self.kv = PagedKv(model.shape, blocks, block_size, dtype, int8=kv_int8)
        self._states = states
        self._state_memory = StateMemory(model.shape, states.slots) if states is not None else None
        self._decoder = Decoder(
            model.shape, model.weights, self.kv, self._state_memory, batch_invariant=batch_invariant
        )
        self._dtype = dtype
        self._batch_invariant = batch_invariant

    def run(self, batch: Batch) -> tuple[tuple[Work, ...], torch.Tensor]:
        """Compute and store KV of every row; the rows that sample, and their logits [rows, vocab] in fp32.

        Raises:
            NotFinite: for some row; run rows alone to find it. No other row's KV suffers from it.
        """
        plan = plan_step(
            batch,
            self.kv.block_size,
            self._dtype,
            batch_invariant=self._batch_invariant,
            reads_back=self.kv.int8,
            state_slot=self._states.slot if self._states is not None else None,
        )
        logits, finite = self._forward(plan)
        if not finite:
            raise NotFinite("the model computed numbers that are not finite")
        if self._states is not None:
            for row in batch.rows:
                self._states.ran(row.sequence, row.start, row.start + row.count)
        return plan.works, logits

    def _forward(self, plan: StepPlan) -> tuple[torch.Tensor, bool]:
        """The forward pass; recurrent states advance only if it ends well, so that it can be tried again."""
        states, memory = self._states, self._state_memory
        if states is None or memory is None:
            return self._decoder.forward(plan)
        memory.carry_out(states.take_orders())
        finite = False
        try:
            logits, finite = self._decoder.forward(plan)
        finally:
            memory.finish_step(succeeded=finite)
        return logits, finite
