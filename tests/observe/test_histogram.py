"""A histogram counts as Prometheus' own does."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from relay.observe.histogram import Histogram

BOUNDS = (0.1, 1.0, 10.0)


@given(st.lists(st.tuples(st.floats(0, 20) | st.sampled_from(BOUNDS), st.integers(1, 5))))
def test_it_counts_as_the_library_s(values: list[tuple[float, int]]) -> None:
    ours, reference = Histogram(BOUNDS), Reference("reference", "", buckets=BOUNDS, registry=CollectorRegistry())
    for value, times in values:
        ours.observe(value, times)
        for _ in range(times):
            reference.observe(value)

    (family,) = reference.collect()
    samples = family.samples
    counted = [(float(sample.labels["le"]), int(sample.value)) for sample in samples if "le" in sample.labels]
    (total,) = [sample.value for sample in samples if sample.name.endswith("_sum")]
    assert ours.buckets() == counted
    assert abs(ours.total - total) < 1e-6
