//! The option `--page`: a picture of the pool and of the requests over time, in one HTML file.

use std::fmt::Write;
use std::path::Path;

use candle_core::Result;

use crate::common::cannot;
use crate::common::page::print_size;
use crate::scheduler::RequestId;
use crate::timeline::{Period, Timeline};

/// The width of the area of a picture in pixels, and the space on its left and right for texts.
const WIDTH: f64 = 900.0;
const LEFT: f64 = 120.0;
const RIGHT: f64 = 40.0;
/// The greatest height of all pages together.
const PAGES_HEIGHT: f64 = 480.0;
/// The greatest height of a page, and the height of a request.
const PAGE_HEIGHT: f64 = 14.0;
const REQUEST_HEIGHT: f64 = 18.0;
/// The height of the axis of time.
const AXIS_HEIGHT: f64 = 36.0;
/// The number of parts into which the ticks divide the time.
const TICKS: usize = 5;

const STYLE: &str = "body { font: 14px system-ui, sans-serif; margin: 24px; max-width: 1100px } \
    svg { display: block; max-width: 100% } text { font: 12px system-ui, sans-serif } \
    .end { text-anchor: end } .middle { text-anchor: middle } .shared { fill: #444 } .waits { fill: #ccc } \
    .frame { fill: none; stroke: #888 } .preempted { stroke: #000; stroke-dasharray: 3 2 }";

/// A request in the picture.
#[derive(Debug)]
pub struct PictureRequest {
    pub name: String,
    pub arrival: f64,
    pub end: f64,
}

/// A picture that grows with the steps of a run.
#[derive(Debug, Default)]
pub struct Picture {
    pub timeline: Timeline,
    /// The requests by their ids.
    pub requests: Vec<PictureRequest>,
}

impl Picture {
    /// Writes the picture of a pool of `pages` pages, with the table of the run, and prints the size of the file.
    pub fn write(&self, path: &Path, pages: usize, table: &str) -> Result<()> {
        std::fs::write(path, self.html(pages, table)).map_err(cannot("write", path))?;
        print_size(path)
    }

    /// Returns the HTML file.
    fn html(&self, pages: usize, table: &str) -> String {
        let highest = self.timeline.pages.iter().map(|used| used.page as usize + 1).max().unwrap_or(0);
        let end = self.requests.iter().map(|request| request.end).fold(0.0, f64::max);
        let scale = WIDTH / end.max(1e-9);
        let used = match highest {
            0 => format!("None of the {pages} pages was used."),
            1 => format!("Page 0 of {pages}, the only one that was used, in the colour of its request."),
            _ => format!(
                "Pages 0 to {} of {pages}; no other page was used. Each row is a page, in the colour of its request; \
                 dark pages are shared. Dashed lines are preemptions.",
                highest - 1
            ),
        };
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>Pages of the requests</title>\n\
             <style>{STYLE}</style>\n<h1>Pages of the requests</h1>\n<p>{used}</p>\n{}\n\
             <h1>Requests</h1>\n<p>Grey: waiting. Light: within the prompt. Full colour: a token in each step.</p>\n{}\n\
             <pre>{}</pre>\n</html>\n",
            self.pages(highest, scale),
            self.services(scale),
            escaped(table)
        )
    }

    /// Draws the uses of the first `highest` pages.
    fn pages(&self, highest: usize, scale: f64) -> String {
        let row = (PAGES_HEIGHT / highest.max(1) as f64).min(PAGE_HEIGHT);
        let height = row * highest as f64;
        let mut svg = begin(height);
        for used in &self.timeline.pages {
            let color = match used.requests.as_slice() {
                [one] => format!("fill=\"{}\"", color(*one)),
                _ => "class=\"shared\"".to_string(),
            };
            let names: Vec<_> = used.requests.iter().map(|&request| self.name(request)).collect();
            let about = format!("page {}: {}", used.page, names.join(", "));
            rectangle(&mut svg, used.period, scale, f64::from(used.page) * row, row, &color, &about);
        }
        for preemption in &self.timeline.preemptions {
            let x = LEFT + preemption.time * scale;
            let name = self.name(preemption.request);
            let _ = writeln!(
                svg,
                "<line class=\"preempted\" x1=\"{x:.1}\" y1=\"0\" x2=\"{x:.1}\" y2=\"{height:.1}\">\
                 <title>{name} returns its pages at {:.3} s</title></line>",
                preemption.time
            );
        }
        text(&mut svg, LEFT - 6.0, 10.0, "end", "page 0");
        text(&mut svg, LEFT - 6.0, height, "end", &format!("page {}", highest.saturating_sub(1)));
        end(&mut svg, height, scale);
        svg
    }

    /// Draws the times in which each request waited and had pages.
    fn services(&self, scale: f64) -> String {
        let height = REQUEST_HEIGHT * self.requests.len() as f64;
        let mut svg = begin(height);
        for (n, request) in self.requests.iter().enumerate() {
            let top = REQUEST_HEIGHT * n as f64;
            let whole = Period { from: request.arrival, to: request.end };
            let about = format!("{} arrives at {:.3} s and ends at {:.3} s", request.name, whole.from, whole.to);
            rectangle(&mut svg, whole, scale, top + 7.0, 4.0, "class=\"waits\"", &escaped(&about));
            let shown: String = request.name.chars().take(16).collect();
            text(&mut svg, LEFT - 6.0, top + 13.0, "end", &escaped(&shown));
        }
        for service in &self.timeline.services {
            let opacity = if service.generates { 1.0 } else { 0.45 };
            let color = format!("fill=\"{}\" opacity=\"{opacity}\"", color(service.request));
            let about = self.name(service.request);
            let top = REQUEST_HEIGHT * service.request.0 as f64 + 2.0;
            rectangle(&mut svg, service.period, scale, top, REQUEST_HEIGHT - 4.0, &color, &about);
        }
        end(&mut svg, height, scale);
        svg
    }

    /// Returns the escaped name of a request.
    fn name(&self, request: RequestId) -> String {
        self.requests.get(request.0).map_or_else(String::new, |request| escaped(&request.name))
    }
}

/// Returns the beginning of a picture with an area of this height above its axis.
fn begin(height: f64) -> String {
    let width = LEFT + WIDTH + RIGHT;
    let height = height + AXIS_HEIGHT;
    format!("<svg viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\">\n")
}

/// Draws the frame and the axis of time, and ends the picture.
fn end(svg: &mut String, height: f64, scale: f64) {
    let _ = writeln!(svg, "<rect class=\"frame\" x=\"{LEFT}\" y=\"0\" width=\"{WIDTH}\" height=\"{height:.1}\"/>");
    for n in 0..=TICKS {
        let x = WIDTH * n as f64 / TICKS as f64;
        text(svg, LEFT + x, height + 16.0, "middle", &format!("{:.2} s", x / scale));
    }
    svg.push_str("</svg>");
}

/// Draws a rectangle over a period, with an escaped text that a browser shows above it.
fn rectangle(svg: &mut String, period: Period, scale: f64, top: f64, height: f64, color: &str, about: &str) {
    let Period { from, to } = period;
    let _ = writeln!(
        svg,
        "<rect {color} x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{height:.1}\">\
         <title>{about}, {from:.3} s to {to:.3} s</title></rect>",
        LEFT + from * scale,
        (to - from) * scale
    );
}

/// Draws an escaped text.
fn text(svg: &mut String, x: f64, y: f64, class: &str, text: &str) {
    let _ = writeln!(svg, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{text}</text>");
}

/// Returns the colour of a request, which is far from the colours of its neighbours.
fn color(request: RequestId) -> String {
    let hue = (request.0 as f64 * 137.508) % 360.0;
    format!("hsl({hue:.0} 60% 55%)")
}

/// Returns a text with the characters escaped that have a meaning in HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
