def supported() -> bool: ...
def room(kv_heads: int, dim: int, keys: int, threads: int, /) -> int: ...
def attend(
    queries: int,
    kv: int,
    table: int,
    out: int,
    work: int,
    query_step: int,
    block_step: int,
    token_step: int,
    out_step: int,
    block_size: int,
    kv_heads: int,
    group: int,
    dim: int,
    rows: int,
    prefix: int,
    window: int,
    threads: int,
    /,
) -> None: ...
