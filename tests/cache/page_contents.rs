//! The contents of pages and states after thousands of random schedules: each row of a pool has the token at its
//! position, and each state the hash of all tokens before it, as if every sequence were alone. The pools are lists.

use std::collections::BTreeSet;

use crate::*;

const PAGES: usize = 9;
const PAGE: usize = 16;
const STATES: usize = 20;
const DRAFTS: usize = 5;

/// Returns the hash of tokens, one after the other.
fn hash(tokens: &[u32]) -> u32 {
    tokens.iter().fold(7, |before: u32, token| (before ^ token).wrapping_mul(0x9e37_79b1).rotate_left(5))
}

/// A schedule over a table, with the lists that take the place of pools.
struct Contents {
    table: PageTable,
    rows: Vec<u32>,
    states: Vec<u32>,
    live: Vec<(SequenceId, Vec<u32>)>,
    /// The number of operations that were refused because pages or states were missing.
    refused: usize,
}

impl Contents {
    fn new(has_states: bool) -> Result<Self> {
        let mut table = PageTable::new(PAGES, PAGE)?;
        if has_states {
            table = table.with_states(STATES)?.with_drafts(DRAFTS)?;
        }
        Ok(Self { table, rows: vec![0; PAGES * PAGE], states: vec![0; STATES], live: Vec::new(), refused: 0 })
    }

    fn run(&mut self, random: &mut Random, operations: usize) -> Result<()> {
        for _ in 0..operations {
            let drawn = if self.live.is_empty() { None } else { Some(random.up_to(self.live.len() - 1)) };
            match (random.up_to(11), drawn) {
                (0 | 1, _) | (_, None) => {
                    let common = random.up_to(60);
                    let ids: Vec<u32> = (0..random.up_to(70)).map(|i| u32::from(i >= common)).collect();
                    let SharedPrefix { sequence, tokens } = self.table.add_with_prefix(&ids);
                    self.live.push((sequence, ids[..tokens].to_vec()));
                }
                (2, Some(n)) => {
                    let forked = self.table.fork(self.live[n].0)?;
                    self.live.push((forked, self.live[n].1.clone()));
                }
                (3, Some(n)) => {
                    let (id, ids) = self.live.swap_remove(n);
                    self.table.share_prefix(id, &ids)?;
                    self.table.free(id)?;
                }
                // A preemption: without the prefix, which may still be found.
                (4, Some(n)) => self.table.free(self.live.swap_remove(n).0)?,
                (5, Some(n)) => {
                    let (id, ids) = &mut self.live[n];
                    let len = ids.len() - random.up_to(ids.len().min(8));
                    if self.table.truncate(*id, len).is_ok() {
                        ids.truncate(len);
                    }
                }
                (6, Some(n)) => self.draft(n, random)?,
                _ => self.step(random)?,
            }
            self.check()?;
        }
        Ok(())
    }

    /// Brings chunks and tokens to some sequences. Sometimes the step is dropped.
    fn step(&mut self, random: &mut Random) -> Result<()> {
        let chosen: Vec<usize> = (0..self.live.len()).filter(|_| random.chance(0.6)).collect();
        let mut new = Vec::new();
        for _ in &chosen {
            let count = if random.chance(0.5) { 1 } else { random.up_to(30) };
            new.push((0..count).map(|_| random.up_to(1) as u32).collect::<Vec<_>>());
        }
        let is_dropped = random.chance(0.15);
        self.append(&chosen, &new, is_dropped)
    }

    fn append(&mut self, chosen: &[usize], new: &[Vec<u32>], is_dropped: bool) -> Result<()> {
        let entries: Vec<_> = chosen.iter().zip(new).map(|(&n, own)| self.live[n].0.tokens(own.len())).collect();
        let Ok(step) = self.table.step(&entries) else {
            self.refused += 1;
            return Ok(());
        };
        for &PageCopy { from, to } in step.copies() {
            self.rows.copy_within(from as usize * PAGE..(from as usize + 1) * PAGE, to as usize * PAGE);
        }
        for (row, token) in step.rows().into_iter().zip(new.concat()) {
            self.rows[row as usize] = token;
        }
        for (own, (&n, ids)) in step.states().iter().zip(chosen.iter().zip(new)) {
            let before = &self.live[n].1;
            assert_eq!(own.before.map_or(7, |state| self.states[state as usize]), hash(before));
            for after in &own.after {
                self.states[after.state as usize] = hash(&[before, &ids[..after.tokens]].concat());
            }
        }
        if !is_dropped {
            step.commit();
            for (&n, ids) in chosen.iter().zip(new) {
                self.live[n].1.extend(ids);
            }
        }
        Ok(())
    }

    /// Brings drafts to a sequence, and keeps some of them: with states the first ones, since the state after a draft
    /// follows from all drafts before it.
    fn draft(&mut self, n: usize, random: &mut Random) -> Result<()> {
        let before = self.live[n].1.len();
        let drafts: Vec<u32> = (0..DRAFTS).map(|_| random.up_to(1) as u32).collect();
        self.append(&[n], std::slice::from_ref(&drafts), false)?;
        let (id, ids) = &mut self.live[n];
        if ids.len() == before {
            return Ok(());
        }
        let is_row = self.table.states() > 0 || random.chance(0.5);
        let last = random.up_to(DRAFTS);
        let kept: Vec<usize> = (0..last).filter(|_| is_row || random.chance(0.6)).collect();
        let moves = self.table.keep(*id, before, &kept)?;
        let read: Vec<u32> = moves.from().iter().map(|&row| self.rows[row as usize]).collect();
        for (&row, token) in moves.to().iter().zip(read) {
            self.rows[row as usize] = token;
        }
        ids.truncate(before);
        ids.extend(kept.iter().map(|&token| drafts[token]));
        Ok(())
    }

    /// Checks every row and state of every sequence, and the counts of the table.
    fn check(&self) -> Result<()> {
        let mut used: BTreeSet<u32> = BTreeSet::new();
        for (id, ids) in &self.live {
            assert_eq!(self.table.len(*id)?, ids.len());
            let pages = self.table.pages_of(*id)?;
            assert_eq!(pages.len(), ids.len().div_ceil(PAGE));
            for (position, token) in ids.iter().enumerate() {
                let row = pages[position / PAGE] as usize * PAGE + position % PAGE;
                assert_eq!(self.rows[row], *token, "position {position} of {} tokens", ids.len());
            }
            used.extend(pages);
        }
        assert_eq!((self.table.used_pages(), self.table.num_sequences()), (used.len(), self.live.len()));
        Ok(())
    }
}

#[test]
fn pages_and_states_after_thousands_of_random_schedules_have_the_tokens_of_each_sequence() -> Result<()> {
    for has_states in [false, true] {
        let mut refused = 0;
        for seed in 0..1500 {
            let mut contents = Contents::new(has_states)?;
            contents.run(&mut Random::new(seed), 40)?;
            refused += contents.refused;
            for (id, _) in contents.live {
                contents.table.free(id)?;
            }
            assert_eq!((contents.table.free_pages(), contents.table.free_states()), (PAGES, contents.table.states()));
        }
        assert!(refused > 0, "no step needed more than there was");
    }
    Ok(())
}
