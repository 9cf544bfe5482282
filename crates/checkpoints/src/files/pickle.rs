//! The part of Python's pickle protocol 2 that `torch.save` writes, read as data: no code in it is run.
//!
//! Objects are stored in one list and refer to each other by their index. A hostile file can therefore nest or share
//! objects without limit: memory stays proportional to the file, and no function recurses.

use std::collections::HashMap;

/// The largest number of bytes of the name of a class or a tensor: several times the longest name in use.
pub(super) const MAX_NAME: usize = 1 << 10;

/// The index of an [`Object`] in its [`Pickle`].
pub(super) type Id = usize;

/// An object of a pickle.
#[derive(Debug)]
pub(super) enum Object {
    Int(i64),
    Text(String),
    /// A class or function, by its full name.
    Global(String),
    Tuple(Vec<Id>),
    /// Keys and values in the order of insertion. A key may occur twice.
    Dict(Vec<(Id, Id)>),
    Call {
        function: Id,
        arguments: Id,
    },
    /// A reference to a storage, which is outside the pickle.
    Persistent(Id),
    /// None, booleans, floats, lists: objects that no tensor consists of.
    Other,
}

/// The objects of one pickle; [`top`](Self::top) is the one that was saved.
#[derive(Debug)]
pub(super) struct Pickle {
    objects: Vec<Object>,
    pub top: Id,
}

type PickleResult<T> = std::result::Result<T, String>;

impl Pickle {
    /// Reads a pickle.
    ///
    /// # Errors
    /// For an instruction that state dicts do not use, and for a pickle that ends early or contradicts itself.
    pub(super) fn read(bytes: &[u8]) -> PickleResult<Self> {
        let mut machine = Machine { bytes, ..Machine::default() };
        loop {
            let opcode = machine.byte()?;
            if opcode == b'.' {
                let top = machine.pop()?;
                return Ok(Self { objects: machine.objects, top });
            }
            machine.step(opcode)?;
        }
    }

    pub(super) fn get(&self, id: Id) -> &Object {
        self.objects.get(id).unwrap_or(&Object::Other)
    }

    pub(super) fn int(&self, id: Id) -> Option<i64> {
        if let Object::Int(value) = self.get(id) { Some(*value) } else { None }
    }

    pub(super) fn text(&self, id: Id) -> Option<&str> {
        if let Object::Text(text) = self.get(id) { Some(text) } else { None }
    }

    pub(super) fn global(&self, id: Id) -> Option<&str> {
        if let Object::Global(name) = self.get(id) { Some(name) } else { None }
    }

    pub(super) fn tuple(&self, id: Id) -> Option<&[Id]> {
        if let Object::Tuple(items) = self.get(id) { Some(items) } else { None }
    }
}

/// The stack machine that runs a pickle.
#[derive(Default)]
struct Machine<'a> {
    bytes: &'a [u8],
    objects: Vec<Object>,
    stack: Vec<Id>,
    /// Heights of the stack at the open marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl Machine<'_> {
    fn step(&mut self, opcode: u8) -> PickleResult<()> {
        match opcode {
            // PROTO
            0x80 => match self.byte()? {
                2 => {}
                version => return Err(format!("pickle protocol {version}, expected torch.save's default, 2")),
            },
            // NONE, NEWTRUE, NEWFALSE, EMPTY_LIST
            b'N' | 0x88 | 0x89 | b']' => self.push(Object::Other),
            // BINFLOAT
            b'G' => {
                self.take(8)?;
                self.push(Object::Other);
            }
            // BININT, BININT1, BININT2, LONG1
            b'J' | b'K' | b'M' | 0x8a => {
                let (len, signed) = match opcode {
                    b'J' => (4, true),
                    b'K' => (1, false),
                    b'M' => (2, false),
                    _ => (self.byte()?.into(), true),
                };
                let value = little_endian(self.take(len)?, signed);
                self.push(value.map_or(Object::Other, Object::Int));
            }
            // BINUNICODE
            b'X' => {
                let len = u32::from_le_bytes(self.array()?);
                let text = String::from_utf8(self.take(len as usize)?.to_vec()).map_err(|_| "a text is not UTF-8")?;
                self.push(Object::Text(text));
            }
            // GLOBAL
            b'c' => {
                let name = format!("{}.{}", self.line()?, self.line()?);
                self.push(Object::Global(name));
            }
            // MARK
            b'(' => self.marks.push(self.stack.len()),
            // EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE
            b')' => self.push(Object::Tuple(Vec::new())),
            0x85..=0x87 => {
                let mut items = Vec::with_capacity(3);
                for _ in 0x85..=opcode {
                    items.push(self.pop()?);
                }
                items.reverse();
                self.push(Object::Tuple(items));
            }
            b't' => {
                let items = self.pop_to_mark()?;
                self.push(Object::Tuple(items));
            }
            // EMPTY_DICT, SETITEM, SETITEMS
            b'}' => self.push(Object::Dict(Vec::new())),
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.insert(&[key, value])?;
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.insert(&items)?;
            }
            // APPEND, APPENDS: the list stays on the stack.
            b'a' => {
                self.pop()?;
            }
            b'e' => {
                self.pop_to_mark()?;
            }
            // REDUCE, NEWOBJ
            b'R' | 0x81 => {
                let arguments = self.pop()?;
                let function = self.pop()?;
                let is_dict = matches!(
                    &self.objects[function],
                    Object::Global(name) if name == "collections.OrderedDict" || name == "collections.defaultdict"
                );
                self.push(if is_dict { Object::Dict(Vec::new()) } else { Object::Call { function, arguments } });
            }
            // BUILD: attributes of the object below, which are not used.
            b'b' => {
                self.pop()?;
            }
            // BINPERSID
            b'Q' => {
                let id = self.pop()?;
                self.push(Object::Persistent(id));
            }
            // BINPUT, LONG_BINPUT, BINGET, LONG_BINGET
            b'q' | b'r' => {
                let key = self.memo_key(opcode == b'r')?;
                let top = self.pop()?;
                self.stack.push(top);
                self.memo.insert(key, top);
            }
            b'h' | b'j' => {
                let key = self.memo_key(opcode == b'j')?;
                let id = self.memo.get(&key).ok_or("an object is used before it is made")?;
                self.stack.push(*id);
            }
            other => return Err(format!("instruction {other:#04x}, which no state dict has")),
        }
        Ok(())
    }

    fn push(&mut self, object: Object) {
        self.stack.push(self.objects.len());
        self.objects.push(object);
    }

    /// Removes the topmost object above the last mark.
    fn pop(&mut self) -> PickleResult<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err("an instruction finds too few objects".into());
        }
        self.stack.pop().ok_or_else(|| "an instruction finds no object".into())
    }

    fn pop_to_mark(&mut self) -> PickleResult<Vec<Id>> {
        let mark = self.marks.pop().ok_or("an instruction finds no mark")?;
        Ok(self.stack.split_off(mark))
    }

    /// Inserts alternating keys and values into the dict on top of the stack.
    fn insert(&mut self, items: &[Id]) -> PickleResult<()> {
        let (pairs, rest) = items.as_chunks();
        let dict = self.stack.last().map(|&id| &mut self.objects[id]);
        match (dict, rest) {
            (Some(Object::Dict(entries)), []) => entries.extend(pairs.iter().map(|&[key, value]| (key, value))),
            // The items of a subclass of dict are not read.
            (Some(Object::Call { .. }), []) => {}
            _ => return Err("items are set of something that is no dict".into()),
        }
        Ok(())
    }

    fn memo_key(&mut self, long: bool) -> PickleResult<u32> {
        if long { Ok(u32::from_le_bytes(self.array()?)) } else { Ok(self.byte()?.into()) }
    }

    fn take(&mut self, len: usize) -> PickleResult<&[u8]> {
        let (taken, rest) = self.bytes.split_at_checked(len).ok_or("the pickle ends early")?;
        self.bytes = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> PickleResult<[u8; N]> {
        let (taken, rest) = self.bytes.split_first_chunk().ok_or("the pickle ends early")?;
        self.bytes = rest;
        Ok(*taken)
    }

    fn byte(&mut self) -> PickleResult<u8> {
        let [byte] = self.array()?;
        Ok(byte)
    }

    fn line(&mut self) -> PickleResult<String> {
        let len = self.bytes.iter().position(|&byte| byte == b'\n').ok_or("the pickle ends early")?;
        if len > MAX_NAME {
            return Err(format!("a name of {len} bytes, expected at most {MAX_NAME}"));
        }
        let line = String::from_utf8_lossy(self.take(len)?).into_owned();
        self.take(1)?;
        Ok(line)
    }
}

/// Returns the number in up to eight bytes; a signed number is in two's complement.
fn little_endian(bytes: &[u8], signed: bool) -> Option<i64> {
    if bytes.len() > 8 {
        return None;
    }
    let sign = signed && bytes.last().is_some_and(|&last| last >= 0x80);
    let mut whole = if sign { [0xff; 8] } else { [0; 8] };
    whole[..bytes.len()].copy_from_slice(bytes);
    Some(i64::from_le_bytes(whole))
}
