//! Pictures: read from PNG, brought to a model's size and colours, and written with attention over them.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::Path;

use candle_core::{Device, Error, Result, Tensor, bail};
use serde_json::Value;

use crate::EXAMPLE;
use crate::resample::{BICUBIC, BILINEAR, Filter, Size, resample};

/// The part of a pixel's colour that attention takes at most.
const OPACITY: f32 = 0.75;

/// A picture in red, green and blue, from 0 to 255.
pub struct Picture {
    pub size: Size,
    /// A plane for each colour.
    planes: [Vec<f32>; 3],
}

fn wrong(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::Msg(format!("[{EXAMPLE}] {}: {error}", path.display()))
}

impl Picture {
    /// From a PNG of any kind; transparency is left out.
    pub fn open(path: &Path) -> Result<Self> {
        let mut decoder = png::Decoder::new(BufReader::new(File::open(path).map_err(|error| wrong(path, error))?));
        decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
        let mut reader = decoder.read_info().map_err(|error| wrong(path, error))?;
        let Some(bytes) = reader.output_buffer_size() else { return Err(wrong(path, "it is too large")) };
        let mut pixels = vec![0; bytes];
        let info = reader.next_frame(&mut pixels).map_err(|error| wrong(path, error))?;
        pixels.truncate(info.buffer_size());
        let channels = info.color_type.samples();
        // Grey ones have one channel for all, and perhaps transparency.
        let plane = |colour: usize| {
            let channel = if channels < 3 { 0 } else { colour };
            pixels.iter().skip(channel).step_by(channels).map(|&x| f32::from(x)).collect()
        };
        let size = Size { rows: info.height as usize, columns: info.width as usize };
        Ok(Self { size, planes: [plane(0), plane(1), plane(2)] })
    }

    pub fn save(&self, path: &Path) -> Result<()> {
        let file = File::create(path).map_err(|error| wrong(path, error))?;
        self.write(BufWriter::new(file)).map_err(|error| wrong(path, error))
    }

    /// As a PNG file.
    pub fn write(&self, to: impl Write) -> std::result::Result<(), png::EncodingError> {
        let mut encoder = png::Encoder::new(to, self.size.columns as u32, self.size.rows as u32);
        encoder.set_color(png::ColorType::Rgb);
        let count = self.size.rows * self.size.columns;
        let pixels: Vec<u8> = (0..count).flat_map(|i| self.planes.each_ref().map(|plane| plane[i] as u8)).collect();
        encoder.write_header()?.write_image_data(&pixels)
    }

    fn map(&self, size: Size, change: impl Fn(&[f32]) -> Vec<f32>) -> Self {
        Self { size, planes: self.planes.each_ref().map(|plane| change(plane)) }
    }

    /// In another size, rounded to whole colours as libraries of pictures do.
    fn resized(&self, size: Size, filter: Filter) -> Self {
        self.map(size, |plane| {
            let resampled = resample(plane, self.size, size, filter);
            resampled.into_iter().map(|x| x.round().clamp(0.0, 255.0)).collect()
        })
    }

    /// The middle of it.
    fn cropped(&self, size: Size) -> Result<Self> {
        let (Some(top), Some(left)) =
            (self.size.rows.checked_sub(size.rows), self.size.columns.checked_sub(size.columns))
        else {
            bail!("[{EXAMPLE}] a picture of {} is smaller than its middle of {size}", self.size)
        };
        Ok(self.map(size, |plane| {
            let rows = plane.chunks(self.size.columns).skip(top / 2).take(size.rows);
            rows.flat_map(|row| row[left / 2..left / 2 + size.columns].to_vec()).collect()
        }))
    }

    /// With weights (rows, columns) over it, from black for none to white for the largest.
    pub fn with_heat(&self, weights: &[f32], grid: Size) -> Self {
        let heat = resample(weights, grid, self.size, BILINEAR);
        let most = heat.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
        let blend = |(x, heat): (&f32, &f32)| {
            let light = 255.0 * (heat / most).clamp(0.0, 1.0);
            (x * (1.0 - OPACITY) + light * OPACITY).round()
        };
        self.map(self.size, |plane| plane.iter().zip(&heat).map(blend).collect())
    }
}

/// What preprocessor_config.json says.
pub struct Preprocessor {
    /// Both sides, or the shorter one.
    resize: Option<(Resize, Filter)>,
    crop: Option<Size>,
    scale: f32,
    mean: [f32; 3],
    std: [f32; 3],
}

enum Resize {
    To(Size),
    ShorterSide(usize),
}

impl Preprocessor {
    pub fn read(json: &Value) -> Result<Self> {
        let flag = |name: &str| json[name].as_bool().unwrap_or(true);
        let colours = |name: &str, default: f32| match serde_json::from_value(json[name].clone()) {
            Ok(three) if flag("do_normalize") => Ok(three),
            _ if json[name].is_null() || !flag("do_normalize") => Ok([default; 3]),
            _ => bail!("[{EXAMPLE}] {name} is {}, expected three numbers", json[name]),
        };
        let number = |value: &Value| value.as_u64().filter(|&n| n > 0 && n < 1 << 15).map(|n| n as usize);
        let sides = |value: &Value| match (number(&value["height"]), number(&value["width"]), number(value)) {
            (Some(rows), Some(columns), _) => Some(Size { rows, columns }),
            (_, _, Some(side)) => Some(Size { rows: side, columns: side }),
            _ => None,
        };
        let filter = match json["resample"].as_u64().unwrap_or(2) {
            2 => BILINEAR,
            3 => BICUBIC,
            other => bail!("[{EXAMPLE}] resample is {other}, expected 2 (bilinear) or 3 (bicubic)"),
        };
        let resize = match (flag("do_resize"), sides(&json["size"]), number(&json["size"]["shortest_edge"])) {
            (false, ..) => None,
            (true, Some(size), _) => Some((Resize::To(size), filter)),
            (true, None, Some(side)) => Some((Resize::ShorterSide(side), filter)),
            (true, None, None) => bail!("[{EXAMPLE}] size is {}, expected height and width", json["size"]),
        };
        let crops = json["do_center_crop"].as_bool().unwrap_or(false);
        let crop = if crops { sides(&json["crop_size"]) } else { None };
        if crops && crop.is_none() {
            bail!("[{EXAMPLE}] crop_size is {}, expected height and width", json["crop_size"])
        }
        let scale = json["rescale_factor"].as_f64().unwrap_or(1.0 / 255.0) as f32;
        Ok(Self {
            resize,
            crop,
            scale: if flag("do_rescale") { scale } else { 1.0 },
            mean: colours("image_mean", 0.0)?,
            std: colours("image_std", 1.0)?,
        })
    }

    /// The picture in the model's size.
    pub fn apply(&self, picture: &Picture) -> Result<Picture> {
        let Size { rows, columns } = picture.size;
        let resized = match &self.resize {
            Some((Resize::To(size), filter)) => picture.resized(*size, *filter),
            Some((Resize::ShorterSide(side), filter)) => {
                let other = |own: usize| side * own / rows.min(columns);
                picture.resized(Size { rows: other(rows), columns: other(columns) }, *filter)
            }
            None => picture.map(picture.size, <[f32]>::to_vec),
        };
        self.crop.map_or(Ok(None), |size| resized.cropped(size).map(Some)).map(|cropped| cropped.unwrap_or(resized))
    }

    /// A picture in the model's size as numbers (3, rows, columns).
    pub fn pixels(&self, picture: &Picture) -> Result<Tensor> {
        let Size { rows, columns } = picture.size;
        let planes = picture.planes.iter().zip(self.mean.iter().zip(&self.std));
        let normal = planes.flat_map(|(plane, (mean, std))| plane.iter().map(move |x| (x * self.scale - mean) / std));
        Tensor::from_iter(normal, &Device::Cpu)?.reshape((3, rows, columns))
    }
}
