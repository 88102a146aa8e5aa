"""The metrics page of a real vLLM, and pages that are not quite one."""

from router.proxy.vllm_metrics import parse_load_report

# Lines as vLLM 0.32 prints them.
PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 4170.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 1120.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="120"} 1.0
"""


def test_a_vllm_page() -> None:
    report = parse_load_report(PAGE)
    assert (report.running, report.waiting, report.kv_usage) == (2, 5, 0.25)
    assert (report.prefix_queried_tokens, report.prefix_hit_tokens) == (4170.0, 1120.0)
    assert (report.capacity_tokens, report.block_size) == (3_840, 32)


def test_ranks_add_up_and_shares_are_averaged() -> None:
    second = PAGE.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75")
    report = parse_load_report(PAGE + second)
    assert (report.running, report.waiting, report.kv_usage) == (4, 10, 0.5)
    assert report.capacity_tokens == 7_680


def test_what_is_not_told_is_unknown_not_zero() -> None:
    report = parse_load_report("# nothing here\nother_metric 3\nvllm:num_requests_running NaN\n\x00\xff{")
    assert report.running is None and report.kv_usage is None and report.capacity_tokens is None
