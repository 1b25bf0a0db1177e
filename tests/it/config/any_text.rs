//! Whatever is written, reading it ends with a configuration or with errors.

use std::time::Duration;

use proptest::prelude::*;

use super::{EXAMPLE, load_text, route};

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = load_text(bytes);
    }

    #[test]
    fn random_toml_like_text_never_panics(
        text in r#"([a-z\[\]{}="'#.,0-9 \\\n]|\[\[(route|pool|token)\]\]\n|(store|url|lease|path|key) = |true|"\$\{env:A\}"){0,60}"#,
    ) {
        let _ = load_text(text);
    }

    #[test]
    fn an_example_with_something_missing_or_doubled_never_panics(
        at in 0..EXAMPLE.len(), length in 0..200usize, double in any::<bool>(),
    ) {
        let bytes = EXAMPLE.as_bytes();
        let end = (at + length).min(bytes.len());
        let again = if double { at } else { end };
        let text = [&bytes[..if double { end } else { at }], &bytes[again..]].concat();
        let _ = load_text(text);
    }

    #[test]
    fn a_duration_means_what_it_says(ms in 1..=86_400_000u64, unit in 0..3usize) {
        let (text, meant) = match unit {
            0 => (format!("{ms}ms"), Duration::from_millis(ms)),
            1 => (format!("{}s {}ms", ms / 1000, ms % 1000), Duration::from_millis(ms)),
            _ => (format!("{}m", ms / 60_000 + 1), Duration::from_mins(ms / 60_000 + 1)),
        };
        let loaded = load_text(route(&format!("tombstone = \"{text}\""))).unwrap();
        prop_assert_eq!(loaded.config.routes[0].policy.tombstone_for, meant);
    }

    #[test]
    fn a_size_means_what_it_says(number in 1..=200u64, unit in 0..4usize) {
        let (unit, factor) = [("", 1), ("KB", 1000), ("KiB", 1024), ("MiB", 1 << 20)][unit];
        let loaded = load_text(route(&format!("body_max = \"{number}{unit}\""))).unwrap();
        let expected = usize::try_from(number * factor).unwrap();
        prop_assert_eq!(loaded.config.routes[0].policy.body_bytes_max, expected);
    }

    #[test]
    fn any_text_as_a_value_never_panics(value in ".{0,30}", key in 0..6usize) {
        let key = ["wait", "body_max", "path", "key", "host", "on_unknown"][key];
        let _ = load_text(route(&format!("{key} = {value:?}")));
    }
}
