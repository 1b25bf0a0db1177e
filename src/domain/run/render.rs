//! Templates become bytes.
