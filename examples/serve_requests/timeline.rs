//! The pages and the requests of a run over time, for a picture.

use std::collections::BTreeMap;

use crate::scheduler::{RequestId, StepReport};

/// A time from one second to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Period {
    pub from: f64,
    pub to: f64,
}

/// A time during which a page belonged to the same requests.
#[derive(Debug, Clone, PartialEq)]
pub struct PageUse {
    pub page: u32,
    /// The requests, in order; several share the page.
    pub requests: Vec<RequestId>,
    pub period: Period,
}

/// A time during which a request had pages.
#[derive(Debug, Clone, PartialEq)]
pub struct Service {
    pub request: RequestId,
    /// Whether each step returned a token of the request. Otherwise the steps were within its prompt, or computed it
    /// again after a preemption.
    pub generates: bool,
    pub period: Period,
}

/// A preemption of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Preemption {
    pub request: RequestId,
    pub time: f64,
}

/// The steps of a run so far.
#[derive(Debug, Default)]
pub struct Timeline {
    pub pages: Vec<PageUse>,
    pub services: Vec<Service>,
    pub preemptions: Vec<Preemption>,
    /// The index in `pages` of the use of each page in the last step.
    last_use: BTreeMap<u32, usize>,
    /// The index in `services` of the service of each request in the last step.
    last_service: BTreeMap<RequestId, usize>,
}

impl Timeline {
    /// Adds a step that took a period.
    pub fn add(&mut self, step: &StepReport, period: Period) {
        self.add_pages(step, period);
        self.add_services(step, period);
        for &request in &step.preempted {
            self.preemptions.push(Preemption { request, time: period.from });
        }
    }

    fn add_pages(&mut self, step: &StepReport, period: Period) {
        let mut requests_of: BTreeMap<u32, Vec<RequestId>> = BTreeMap::new();
        for of_request in &step.pages {
            for &page in &of_request.pages {
                requests_of.entry(page).or_default().push(of_request.request);
            }
        }
        let mut uses = BTreeMap::new();
        for (page, requests) in requests_of {
            let before = self.last_use.get(&page).copied().filter(|&at| self.pages[at].requests == requests);
            let at = match before {
                Some(at) => {
                    self.pages[at].period.to = period.to;
                    at
                }
                None => {
                    self.pages.push(PageUse { page, requests, period });
                    self.pages.len() - 1
                }
            };
            uses.insert(page, at);
        }
        self.last_use = uses;
    }

    fn add_services(&mut self, step: &StepReport, period: Period) {
        let mut services = BTreeMap::new();
        for of_request in &step.pages {
            let request = of_request.request;
            let generates = step.generated.iter().any(|generated| generated.request == request);
            let before = self.last_service.get(&request).copied();
            let at = match before.filter(|&at| self.services[at].generates == generates) {
                Some(at) => {
                    self.services[at].period.to = period.to;
                    at
                }
                None => {
                    self.services.push(Service { request, generates, period });
                    self.services.len() - 1
                }
            };
            services.insert(request, at);
        }
        self.last_service = services;
    }
}
