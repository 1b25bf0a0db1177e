//! What a gateway tells of itself at `/metrics`.

use std::collections::BTreeMap;

/// What `/metrics` said.
#[derive(Debug)]
pub struct Metrics(Vec<Sample>);

#[derive(Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Metrics {
    /// Reads the text format of Prometheus.
    pub fn read(text: &str) -> Self {
        Self(text.lines().filter_map(sample).collect())
    }

    /// The sum of all samples with this name and these labels.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let samples = self.0.iter().filter(|sample| sample.name == name);
        samples
            .filter(|sample| {
                let has = |(label, value): &(&str, &str)| {
                    sample.labels.get(*label).is_some_and(|have| have == value)
                };
                labels.iter().all(has)
            })
            .map(|sample| sample.value)
            .sum()
    }

    /// Every name.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|sample| sample.name.as_str())
    }

    /// Every value of every label.
    pub fn label_values(&self) -> impl Iterator<Item = &str> {
        let labels = self.0.iter().flat_map(|sample| sample.labels.values());
        labels.map(String::as_str)
    }
}

fn sample(line: &str) -> Option<Sample> {
    if line.starts_with('#') {
        return None;
    }
    let (series, value) = line.rsplit_once(' ')?;
    let value = value.parse().ok()?;
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let labels = labels.strip_suffix('}')?.split("\",").filter_map(|pair| {
        let (label, value) = pair.split_once("=\"")?;
        Some((label.to_owned(), value.trim_end_matches('"').to_owned()))
    });
    Some(Sample {
        name: name.to_owned(),
        labels: labels.collect(),
        value,
    })
}

#[test]
fn figures_are_read() {
    let metrics = Metrics::read(
        "# HELP a b\na_total{pool=\"p\",status=\"x\"} 2\na_total{pool=\"q\",status=\"x\"} 1\nb 0.5\n",
    );
    for (name, labels, value) in [
        ("a_total", &[("status", "x")][..], 3.0),
        ("a_total", &[("pool", "q")], 1.0),
        ("b", &[], 0.5),
        ("c", &[], 0.0),
    ] {
        assert!(
            (metrics.sum(name, labels) - value).abs() < 1e-9,
            "{name}{labels:?}"
        );
    }
}
