//! `[[pool]]`, and what `--upstream` makes of it.

use std::path::PathBuf;

use http::Uri;

use super::PoolConfig;
use super::input::Given;
use super::parse::{self, DURATION_MAX, DURATION_MIN};
use super::report::{Origin, Report};
use super::section::Section;
use super::value::Read;

/// The pool that `--upstream` gives the targets of.
pub(super) const DEFAULT_POOL: &str = "default";

/// Pools, each with where it begins.
pub(super) type Pools = Vec<(Origin, Option<PoolConfig>)>;

/// Reads every pool; `None` for one that something is missing of.
pub(super) fn read(top: &mut Section<'_>, upstream: Option<&Given>, report: &mut Report) -> Pools {
    let mut sections = top.tables("pool");
    let has_default = sections
        .iter_mut()
        .any(|section| section.says("id", DEFAULT_POOL));
    let implied = upstream.filter(|_| !has_default).map(|given| Given {
        text: DEFAULT_POOL.into(),
        origin: given.origin.clone(),
    });
    if let Some(given) = &implied {
        let name = format!("pool[{}]", sections.len());
        sections.push(top.implied(name, given.origin.clone()));
    }
    let last = sections.len().saturating_sub(1);
    let mut pools: Pools = Vec::new();
    for (index, section) in sections.into_iter().enumerate() {
        let origin = section.origin.clone();
        let id = implied.as_ref().filter(|_| index == last);
        let pool = read_pool(section, id, upstream, report);
        let twin = pools.iter().find(|(_, earlier)| {
            earlier.as_ref().map(|pool| &pool.id) == pool.as_ref().map(|pool| &pool.id)
        });
        if let (Some((earlier, _)), Some(pool)) = (twin, &pool) {
            let id = &pool.id;
            report.error(
                &origin,
                format!("pool `{id}` is already at {earlier}; give each pool its own id"),
            );
        }
        pools.push((origin, pool));
    }
    pools
}

fn read_pool(
    mut section: Section<'_>,
    id: Option<&Given>,
    upstream: Option<&Given>,
    report: &mut Report,
) -> Option<PoolConfig> {
    let id = section.text_required("id", id, "an id such as \"payments\"", parse::pool_id);
    let is_default = id
        .as_ref()
        .is_some_and(|id| id.value.as_str() == DEFAULT_POOL);
    let targets = read_targets(&mut section, upstream.filter(|_| is_default));
    let duration = |section: &mut Section<'_>, key, default| {
        section
            .duration(key, default, DURATION_MIN..=DURATION_MAX)
            .value
    };
    let connect_timeout = duration(&mut section, "connect_timeout", "3s");
    let connections_max = section.count("connections_max", "256", 1..=1_000_000).value;
    let queue_timeout = duration(&mut section, "queue_timeout", "5s");
    let idle_timeout = duration(&mut section, "idle_timeout", "4s");
    let connection_age_max = duration(&mut section, "connection_age_max", "5m");
    let http2 = section.switch("http2", "false").value;
    let ca = section.text_if_any("ca", None, parse::readable_file);
    let preserve_host = section.switch("preserve_host", "true").value;
    report.merge(section.finish());
    Some(PoolConfig {
        id: id?.value,
        targets,
        connect_timeout,
        connections_max,
        queue_timeout,
        idle_timeout,
        connection_age_max,
        http2,
        ca: ca.map(|ca: Read<PathBuf>| ca.value),
        preserve_host,
    })
}

fn read_targets(section: &mut Section<'_>, upstream: Option<&Given>) -> Vec<Uri> {
    let form = "targets such as [\"http://127.0.0.1:9000\"]";
    if upstream.is_some() {
        let target = section.text_required("targets", upstream, form, parse::target);
        return target.into_iter().map(|target| target.value).collect();
    }
    let targets = section.texts("targets", &[], parse::target);
    if !targets.origin.is_written() && targets.sound {
        section.missing("targets", form);
    } else if targets.value.is_empty() && targets.sound {
        let name = section.full_name("targets");
        section
            .report
            .error(&targets.origin, format!("{name} is empty; write {form}"));
    }
    targets.value
}
