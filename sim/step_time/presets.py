"""Named step-time models: the emulated replica of the HTTP benchmark, and one fitted to measurements.

``emufleet``: the figures of the emulated GPU replicas that the project's routing benchmark runs over HTTP, so
that simulation and benchmark can be compared.

``h200-gpt-oss-120b``: prefill fitted to times published by llm-d (2026) for gpt-oss-120b on one H200::

    prompt tokens    2,048   8,192   16,384   32,768   49,152
    measured, ms        78     250      510    1,173    1,988
    fitted, ms          78     250      511    1,173    1,986

Least squares of the relative error of ``steps * fixed + a * n + b * n**2`` with steps of 16,384 tokens; the
largest error is 0.2%. With only five points and three coefficients that says the form fits, not that other
lengths will. The source gives no decode times: ``step_s`` and ``decode_sequence_s`` are *assumed*, equal to
those of ``emufleet``, and ``prefill_step_s`` is what remains of the fitted fixed part.
"""

from sim.step_time.linear import LinearStepTime

PRESETS = {
    "emufleet": LinearStepTime(step_s=0.008, decode_sequence_s=60e-6, prefill_token_s=62.5e-6),
    "h200-gpt-oss-120b": LinearStepTime(
        step_s=0.008,
        decode_sequence_s=60e-6,
        prefill_token_s=25.02e-6,
        attention_tokens=44_447.0,
        prefill_step_s=0.0176,
    ),
}

PRESET_BATCHED_TOKENS = {"emufleet": 8_192, "h200-gpt-oss-120b": 16_384}
"""Tokens per step that each model was made for."""
