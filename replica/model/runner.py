"""Runs a batch through the model: index tensors, forward pass, logits of the rows that sample."""

import torch

from replica.batch import Batch, Work
from replica.model.decoder import Decoder
from replica.model.load import LoadedModel
from replica.model.paged_kv import PagedKv
from replica.model.step_plan import plan_step


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
    ) -> None:
        dtype = model.weights.embedding.dtype
        self.kv = PagedKv(model.shape, blocks, block_size, dtype, int8=kv_int8)
        self._decoder = Decoder(model.shape, model.weights, self.kv, batch_invariant=batch_invariant)
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
        )
        logits, finite = self._decoder.forward(plan)
        if not finite:
            raise NotFinite("the model computed numbers that are not finite")
        return plan.works, logits
