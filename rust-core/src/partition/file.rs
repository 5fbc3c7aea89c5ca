//! Partition files: JSON that maps modules to partitions and can also be written by hand.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

/// Formats a file with these modules and their partitions.
pub fn to_json(partitions: &BTreeMap<String, u32>) -> String {
    let mut text = serde_json::to_string_pretty(partitions).expect("names and numbers are JSON");
    text.push('\n');
    text
}

/// Parses a file; `name` is the file's name in errors.
///
/// # Errors
/// [`Error::Config`] if the text has another form, or contains a partition that does not exist.
pub fn from_json(name: &str, text: &str, partitions: u32) -> Result<BTreeMap<String, u32>> {
    let found: BTreeMap<String, u32> = serde_json::from_str(text).map_err(|error| {
        Error::Config(format!("`{name}` is not a JSON object of modules and their partitions: {error}"))
    })?;
    if let Some((module, index)) = found.iter().find(|&(_, &index)| index >= partitions) {
        return Err(Error::Config(format!(
            "`{name}` puts module `{module}` into partition {index}, but there are {partitions}"
        )));
    }
    Ok(found)
}
