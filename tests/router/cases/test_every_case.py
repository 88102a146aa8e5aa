"""Every bug case of the router and of its load tests has a test named after its id, or stands here as open.

B: public bug reports; K: the 21 black-box cases from routers that look at KV caches (``test_kv_routers.py``).
``pytest -k B147`` runs the tests of case B147, wherever they are.
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
CASES = {
    "proxy-protocol": "B016 B018 B019 B036 B069 B071 B074 B096 B097 B099 B138 B143",
    "streaming": "B001 B003 B037 B038 B060 B072 B073 B076 B098 B100",
    "cancellation": "B014 B033 B052 B102 B141 B147",
    "overload": "B039 B040 B053 B077 B078 B125",
    "discovery/health": "B031 B046 B065 B091 B108 B145",
    "security": "B013 B048 B066 B086 B140",
    "config": "B008 B045 B083 B129",
    "routing-quality": "B030 B041 B054 B062 B079 B080 B088 B104 B126 B133 B134",
    "prefix-hash correctness": "B021 B024 B025 B081 B089 B127 B128 B135 B139",
    "tenant isolation": "B007 B063 B090 B107 B119",
    "load-testing": "B029 B050 B051 B059 B087 B115 B116 B131",
    "metrics": "B027 B112 B113",
    "kv routers": " ".join(f"K{number:02}" for number in range(1, 22)),
    "state sharing": "B022 B057 B084 B093 B109 B117 B118 B137",
}
OPEN = {}
"""Why no test can fail for them yet."""


def ids_in_test_names() -> set[str]:
    """Ids in the names of all tests."""
    return {
        case
        for file in TESTS.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))
        for case in re.findall(r"(?<=_)(?:B\d{3}|K\d{2})(?=_|$)", name)
    }


@pytest.mark.parametrize("category", CASES)
def test_every_case_has_a_test_or_is_open(category: str) -> None:
    cases = set(CASES[category].split())
    assert cases - ids_in_test_names() == cases & set(OPEN)
