//! The time of day, as text.

use std::ffi::CStr;
use std::time::{Duration, SystemTime};

/// Now, as `Mon Jan 20 12:00:01 2020`.
pub(crate) fn date_and_time() -> String {
    local(since_1970(), c"%a %b %d %H:%M:%S %Y")
}

/// Now, as `2020-01-20 12:00:01.123456`.
pub(crate) fn to_the_microsecond() -> String {
    let now = since_1970();
    format!("{}.{:06}", local(now, c"%Y-%m-%d %H:%M:%S"), now.subsec_micros())
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// The current local time, formatted by `strftime`.
fn local(time: Duration, form: &CStr) -> String {
    let mut text = [0u8; 64];
    let seconds = time.as_secs() as libc::time_t;
    // SAFETY: the calls read and write variables of this frame, whose sizes they are told; `localtime_r` fills `fields`
    // before it is read, and one that fails leaves the zeros, which are a valid time.
    let length = unsafe {
        let mut fields: libc::tm = std::mem::zeroed();
        libc::localtime_r(&seconds, &mut fields);
        libc::strftime(text.as_mut_ptr().cast(), text.len(), form.as_ptr(), &fields)
    };
    String::from_utf8_lossy(&text[..length]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_of_the_time() {
        let text = to_the_microsecond();
        let shape: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert_eq!(shape, "0000-00-00 00:00:00.000000");
        assert_eq!(date_and_time().split_whitespace().count(), 5);
    }
}
