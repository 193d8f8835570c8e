"""Response of GET /metrics, parsed with the Prometheus client."""

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text


class MetricsText:
    """Metrics of one scrape; `families` by name, a counter's without `_total`."""

    def __init__(self, text: str, *, openmetrics: bool = False) -> None:
        self.families = {family.name: family for family in (parse_openmetrics if openmetrics else parse_text)(text)}
        self._samples = [sample for family in self.families.values() for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Sum the samples of this name with these labels; 0.0 where there are none."""
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def group_by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Group the samples that are not 0 by the values of these labels."""
        return {
            tuple(sample.labels[label] for label in labels): sample.value
            for sample in self._samples
            if sample.name == name and sample.value
        }
