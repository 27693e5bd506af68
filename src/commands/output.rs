//! What the commands write to a person or a pipe.
//!
//! Whoever reads may stop reading, as `head` does: that is no error, and what a command does beside printing
//! goes on. Anything else that keeps standard output from being written, such as a full disk, is the
//! command's error: half an export must not look like a whole one.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write, stderr, stdout};

/// Prints a line. An [`io::Result`].
macro_rules! say {
    ($($part:tt)*) => {
        $crate::commands::output::write(format_args!("{}\n", format_args!($($part)*)))
    };
}

/// The same without a line's end.
macro_rules! say_text {
    ($($part:tt)*) => { $crate::commands::output::write(format_args!($($part)*)) };
}

/// Tells on standard error what is wrong.
macro_rules! complain {
    ($($part:tt)*) => { $crate::commands::output::tell_error(format_args!($($part)*)) };
}

pub(super) use {complain, say, say_text};

/// Writes to standard output.
pub(super) fn write(text: Arguments<'_>) -> io::Result<()> {
    write_to(stdout().lock(), text)
}

/// Writes a line to standard error. Where that is closed there is nobody left to tell.
pub fn tell_error(text: Arguments<'_>) {
    let _ = writeln!(stderr().lock(), "{text}");
}

fn write_to(mut to: impl Write, text: Arguments<'_>) -> io::Result<()> {
    match to.write_fmt(text).and_then(|()| to.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Refuses(ErrorKind);

    impl Write for Refuses {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(self.0.into())
        }
    }

    #[test]
    fn a_reader_who_has_left_is_no_error_and_a_full_disk_is() {
        assert!(write_to(Refuses(ErrorKind::BrokenPipe), format_args!("text")).is_ok());
        let full = write_to(Refuses(ErrorKind::StorageFull), format_args!("text")).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::StorageFull);
    }
}
