//! Constants of programs that are given by name, for the tests on the emulator. What is not given has a default.

use crate::element::ElementType;

/// The constants that are given, and not used yet.
pub(crate) struct Given {
    constants: Vec<(String, usize)>,
}

impl Given {
    /// Reads options such as `-DHEAD_DIM=64`.
    ///
    /// # Errors
    /// For any other text.
    pub fn parse(options: &str) -> Result<Self, String> {
        let mut constants = Vec::new();
        for option in options.split_whitespace() {
            let constant = option.strip_prefix("-D").and_then(|rest| rest.split_once('='));
            let Some((name, value)) = constant else { return Err(format!("expected -DNAME=NUMBER, found {option}")) };
            let number = value.parse().map_err(|_| format!("{name} is {value}, expected a number"))?;
            constants.push((name.to_string(), number));
        }
        Ok(Self { constants })
    }

    /// Returns the value of a constant, or its default.
    pub fn take(&mut self, name: &str, default: usize) -> usize {
        match self.constants.iter().position(|(given, _)| given == name) {
            Some(at) => self.constants.remove(at).1,
            None => default,
        }
    }

    /// Returns whether a constant is not 0, or its default.
    pub fn flag(&mut self, name: &str, default: bool) -> bool {
        self.take(name, default.into()) != 0
    }

    /// Returns the element type; bf16 by default.
    ///
    /// # Errors
    /// For a number that no type has.
    pub fn element(&mut self) -> Result<ElementType, String> {
        match self.take("ELEMENT", 1) {
            0 => Ok(ElementType::F16),
            1 => Ok(ElementType::Bf16),
            2 => Ok(ElementType::F32),
            other => Err(format!("ELEMENT is {other}, expected 0, 1 or 2")),
        }
    }

    /// Checks that every constant was used.
    ///
    /// # Errors
    /// If one was not.
    pub fn finish(self) -> Result<(), String> {
        match self.constants.first() {
            Some((name, _)) => Err(format!("there is no constant {name}, or it is given twice")),
            None => Ok(()),
        }
    }
}
