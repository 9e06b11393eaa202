"""The sparse form of a job spec: what is sent, stored and read back."""

import json

from hypothesis import given
from hypothesis import strategies as st

from firepool_broker.core.ids import Sku
from firepool_broker.core.pools import Pool, Shape
from firepool_wire.jobspec import Entrypoint, FunctionEntry, JobSpec, Requirements, from_sparse, sparse

words = st.text(max_size=8)
functions = st.builds(
    FunctionEntry,
    payload=st.none() | words,
    args=st.none() | words,
    kind=st.sampled_from(["call", "map", "generator"]),
    depends=st.lists(words, max_size=3).map(tuple),
)
entrypoints = st.builds(Entrypoint, argv=st.lists(words, max_size=3).map(tuple)) | st.builds(
    Entrypoint, function=functions
)
specs = st.builds(
    JobSpec,
    entrypoint=entrypoints,
    sku=words,
    pods=st.integers(1, 8),
    lease_tag=st.none() | words,
    requirements=st.none() | st.builds(Requirements, text=words, mode=st.sampled_from([None, "layer"])),
    env=st.dictionaries(words, words, max_size=3),
    retry_on=st.lists(words, max_size=2).map(tuple),
    run_timeout_s=st.none() | st.floats(0, 1e6),
    untrusted=st.none() | st.booleans(),
)


@given(specs)
def test_a_spec_comes_back_from_its_sparse_json_unchanged(spec: JobSpec) -> None:
    assert from_sparse(JobSpec, json.loads(json.dumps(sparse(spec)))) == spec


def test_fields_at_their_default_are_not_sent() -> None:
    spec = JobSpec(entrypoint=Entrypoint(argv=("true",)), sku="h200")
    assert sparse(spec) == {"entrypoint": {"argv": ["true"]}, "sku": "h200"}


def test_a_field_of_a_newer_version_is_skipped_on_reading() -> None:
    assert from_sparse(JobSpec, {"entrypoint": {"argv": ["true"], "warp": 9}, "mood": 1}).entrypoint.argv == ("true",)


def test_nested_tuples_of_a_pool_come_back() -> None:
    pool = Pool(sku=Sku("h200"), shape=Shape(gpus=8), settings=(("python", "/usr/bin/python3"),), preload=("numpy",))
    assert from_sparse(Pool, json.loads(json.dumps(sparse(pool)))) == pool
