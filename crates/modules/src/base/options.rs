//! Options listed once: a field says how it begins, what it may be, and how it is set and read.

use candle_core::Result;

/// What [`options`] makes of a struct besides its builders and readers.
pub trait Options: Sized {
    /// Every option as it is where nothing is said of it.
    fn unset() -> Self;

    /// Checks each option that has a check by itself.
    ///
    /// # Errors
    /// Names the option, what was expected and what was found.
    fn check(&self, op: &str) -> Result<()>;
}

/// The default of what is so unless a config says otherwise.
pub fn yes() -> bool {
    true
}

/// The default of a number that a config need not say.
pub fn count<const N: u16, T: From<u16>>() -> T {
    N.into()
}

/// `#[apply(options)]` on a struct gives each field `name: T` a builder `with_name`, which takes a `T`, or what is in
/// it where it is an `Option`, and a reader `name`. Both have the field's documentation; a field without any has
/// neither. A field may have these attributes, in this order:
///
/// - `#[serde(..)]`, which the struct keeps.
/// - `#[default(value)]`: where nothing is said, in the place of `Default::default()`.
/// - `#[check(function)]`: `(op, name, value) -> Result<()>`, which refuses what is wrong whatever the other options
///   are.
/// - `#[methods(with)]` or `#[methods(get)]`: the builder or the reader alone, where the other is written by hand.
///   `#[methods(with, get_ref)]`: both, and the reader gives a reference.
///
/// On what one call reads, a struct with a lifetime, it gives builders alone, and `unset` of the first field, which has
/// to be given: every other begins with its default.
#[macro_export]
macro_rules! options {
    (@with () $($rest:tt)*) => {};
    (@with $docs:tt (get) $($rest:tt)*) => {};
    (@with ($($doc:literal)+) $methods:tt $field:ident: $($value:tt)+) => {
        $crate::base::pastey::paste! {
            $(#[doc = $doc])+
            pub fn [<with_ $field>](mut self, $field: $crate::base::options! { @given $($value)+ }) -> Self {
                self.$field = $field.into();
                self
            }
        }
    };

    (@given Option<$value:ty>) => { $value };
    (@given $value:ty) => { $value };

    (@get () $($rest:tt)*) => {};
    (@get $docs:tt (with) $($rest:tt)*) => {};
    (@get ($($doc:literal)+) (with get_ref) $field:ident: Option<$value:ty>) => {
        $(#[doc = $doc])+
        pub fn $field(&self) -> Option<&$value> {
            self.$field.as_ref()
        }
    };
    (@get ($($doc:literal)+) (with get_ref) $field:ident: $value:ty) => {
        $(#[doc = $doc])+
        pub fn $field(&self) -> &$value {
            &self.$field
        }
    };
    (@get ($($doc:literal)+) $methods:tt $field:ident: $value:ty) => {
        $(#[doc = $doc])+
        pub fn $field(&self) -> $value {
            self.$field
        }
    };

    (@unset) => { Default::default() };
    (@unset $value:expr) => { $value };

    (
        $(#[$of_struct:meta])*
        $vis:vis struct $Input:ident<$life:lifetime> {
            $given_vis:vis $given:ident: $given_type:ty,
            $($(#[doc = $doc:literal])* $field_vis:vis $field:ident: $type:ident $(<$inner:ty>)?,)+
        }
    ) => {
        $(#[$of_struct])*
        $vis struct $Input<$life> {
            $given_vis $given: $given_type,
            $($(#[doc = $doc])* $field_vis $field: $type $(<$inner>)?,)+
        }

        /// Builders: each gives the input back with one of its options changed.
        impl<$life> $Input<$life> {
            $($crate::base::options! { @with ($($doc)*) () $field: $type $(<$inner>)? })+

            fn unset($given: $given_type) -> Self {
                Self { $given, $($field: Default::default()),+ }
            }
        }
    };

    (
        $(#[$of_struct:meta])*
        $vis:vis struct $Options:ident {
            $(
                $(#[doc = $doc:literal])*
                $(#[serde($($serde:tt)*)])?
                $(#[default($default:expr)])?
                $(#[check($check:path)])?
                $(#[methods($($method:ident),+)])?
                $field_vis:vis $field:ident: $type:ident $(<$inner:ty>)?,
            )+
        }
    ) => {
        $(#[$of_struct])*
        $vis struct $Options {
            $(
                $(#[doc = $doc])*
                $(#[serde($($serde)*)])?
                $field_vis $field: $type $(<$inner>)?,
            )+
        }

        /// Builders: each gives the options back with one of them changed.
        impl $Options {
            $($crate::base::options! { @with ($($doc)*) ($($($method)+)?) $field: $type $(<$inner>)? })+
        }

        /// Readers of single options.
        impl $Options {
            $($crate::base::options! { @get ($($doc)*) ($($($method)+)?) $field: $type $(<$inner>)? })+
        }

        impl $crate::base::Options for $Options {
            fn unset() -> Self {
                Self { $($field: $crate::base::options! { @unset $($default)? }),+ }
            }

            fn check(&self, _op: &str) -> candle_core::Result<()> {
                $($($check(_op, stringify!($field), self.$field)?;)?)+
                Ok(())
            }
        }
    };
}
pub use options;
