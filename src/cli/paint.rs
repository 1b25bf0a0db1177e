//! Colours for a terminal, and none for a pipe.

use std::fmt::Display;
use std::io::IsTerminal;

/// Whether there are colours.
#[derive(Clone, Copy, Debug)]
pub struct Paint(bool);

impl Paint {
    /// No colours.
    pub const PLAIN: Self = Self(false);

    /// Colours on a terminal, unless `NO_COLOR` is set.
    #[expect(clippy::disallowed_methods, reason = "the command line's environment")]
    pub fn for_terminal(out: &impl IsTerminal) -> Self {
        let unwanted = std::env::var("NO_COLOR").is_ok_and(|value| !value.is_empty());
        Self(out.is_terminal() && !unwanted)
    }

    /// `text` in the colour of the state of a record, a run, an intent or a try.
    pub(super) fn state(self, word: &str, text: &str) -> String {
        let colour = match word {
            "completed" | "delivered" | "good" => "32",
            "pending" | "running" | "waiting" | "open" => "36",
            "failed_before_commit"
            | "compensated"
            | "cancelled"
            | "discarded"
            | "paused"
            | "released"
            | "warn" => "33",
            "outcome_unknown" | "stuck" | "failed" | "dead" | "quarantined" | "lost" | "bad" => {
                "1;31"
            }
            _ => return text.to_owned(),
        };
        self.with(colour, text)
    }

    pub(super) fn bold(self, text: impl Display) -> String {
        self.with("1", text)
    }

    pub(super) fn faint(self, text: impl Display) -> String {
        self.with("2", text)
    }

    pub(super) fn green(self, text: impl Display) -> String {
        self.with("32", text)
    }

    fn with(self, code: &str, text: impl Display) -> String {
        if self.0 {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_string()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_colours_or_none() {
        assert_eq!(Paint::PLAIN.bold("x"), "x");
        assert_eq!(Paint(true).bold("x"), "\x1b[1mx\x1b[0m");
        assert_eq!(Paint(true).state("unheard of", "x"), "x");
    }
}
