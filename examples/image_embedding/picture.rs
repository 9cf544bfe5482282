//! Pictures: read from PNG, converted to a model's size and colours, and written with attention over them.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use candle_core::{DType, Device, Error, Result, Tensor, bail};
use serde_json::Value;

use crate::common::EXAMPLE;
use crate::resample::{BICUBIC, BILINEAR, Filter, MAX_PIXELS, Size, resample};

/// The opacity of the attention over a picture.
const OPACITY: f64 = 0.75;

/// A picture in red, green and blue, from 0 to 255: (3, rows, columns).
pub struct Picture(Tensor);

fn wrong(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::Msg(format!("[{EXAMPLE}] {}: {error}", path.display()))
}

impl Picture {
    /// Reads a PNG of any kind, without its transparency.
    ///
    /// # Errors
    /// If the file is not a PNG, or has more pixels than [`MAX_PIXELS`], which is checked before they get memory.
    pub fn open(path: &Path) -> Result<Self> {
        let mut decoder = png::Decoder::new(BufReader::new(File::open(path).map_err(|error| wrong(path, error))?));
        decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
        let mut reader = decoder.read_info().map_err(|error| wrong(path, error))?;
        let (width, height) = reader.info().size();
        let size = Size { rows: height as usize, columns: width as usize };
        let Some(bytes) = reader.output_buffer_size().filter(|_| size.fits()) else {
            return Err(wrong(path, format!("it has {size} pixels, expected at most {MAX_PIXELS} in all")));
        };
        let mut pixels = vec![0; bytes];
        let info = reader.next_frame(&mut pixels).map_err(|error| wrong(path, error))?;
        pixels.truncate(info.buffer_size());
        let rows = info.height as usize;
        let columns = info.width as usize;
        let pixels = Tensor::from_vec(pixels, (rows, columns, info.color_type.samples()), &Device::Cpu)?;
        let planes = pixels.to_dtype(DType::F32)?.permute((2, 0, 1))?;
        // Grey pictures have one channel for all colours, and perhaps transparency.
        let colours = if planes.dim(0)? < 3 { 1 } else { 3 };
        Ok(Self(planes.narrow(0, 0, colours)?.broadcast_as((3, rows, columns))?.contiguous()?))
    }

    pub fn size(&self) -> Result<Size> {
        let (_, rows, columns) = self.0.dims3()?;
        Ok(Size { rows, columns })
    }

    /// Encodes the picture as a PNG file.
    pub fn to_png(&self) -> Result<Vec<u8>> {
        let Size { rows, columns } = self.size()?;
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, columns as u32, rows as u32);
        encoder.set_color(png::ColorType::Rgb);
        let pixels: Vec<u8> = self.0.permute((1, 2, 0))?.flatten_all()?.to_dtype(DType::U8)?.to_vec1()?;
        encoder.write_header().and_then(|mut writer| writer.write_image_data(&pixels)).map_err(Error::wrap)?;
        Ok(file)
    }

    /// Resizes the picture, with colours rounded to whole numbers as in image libraries.
    fn resized(&self, size: Size, filter: Filter) -> Result<Self> {
        Ok(Self(resample(&self.0, size, filter)?.round()?.clamp(0f32, 255f32)?))
    }

    /// Returns the middle of the picture.
    fn cropped(&self, size: Size) -> Result<Self> {
        let own = self.size()?;
        let (Some(top), Some(left)) = (own.rows.checked_sub(size.rows), own.columns.checked_sub(size.columns)) else {
            bail!("[{EXAMPLE}] a picture of {own} is smaller than its middle of {size}")
        };
        Ok(Self(self.0.narrow(1, top / 2, size.rows)?.narrow(2, left / 2, size.columns)?))
    }

    /// Draws weights (rows, columns) over the picture, from black for none to white for the largest.
    pub fn with_heat(&self, weights: &Tensor) -> Result<Self> {
        let heat = resample(&weights.unsqueeze(0)?, self.size()?, BILINEAR)?;
        let most = f64::from(heat.max_all()?.to_scalar::<f32>()?.max(f32::MIN_POSITIVE));
        let light = ((heat / most)?.clamp(0f32, 1f32)? * (255.0 * OPACITY))?;
        Ok(Self((&self.0 * (1.0 - OPACITY))?.broadcast_add(&light)?.round()?))
    }
}

/// The settings of preprocessor_config.json.
pub struct Preprocessor {
    /// The size to resize to, and the filter.
    resize: Option<(Resize, Filter)>,
    crop: Option<Size>,
    scale: f64,
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
        Ok(Self {
            resize,
            crop,
            scale: if flag("do_rescale") { json["rescale_factor"].as_f64().unwrap_or(1.0 / 255.0) } else { 1.0 },
            mean: colours("image_mean", 0.0)?,
            std: colours("image_std", 1.0)?,
        })
    }

    /// Converts a picture to the model's size.
    pub fn apply(&self, picture: Picture) -> Result<Picture> {
        let Size { rows, columns } = picture.size()?;
        let resized = match &self.resize {
            Some((Resize::To(size), filter)) => picture.resized(*size, *filter)?,
            Some((Resize::ShorterSide(side), filter)) => {
                let other = |own: usize| side * own / rows.min(columns);
                picture.resized(Size { rows: other(rows), columns: other(columns) }, *filter)?
            }
            None => picture,
        };
        if let Some(size) = self.crop { resized.cropped(size) } else { Ok(resized) }
    }

    /// Normalises a picture in the model's size to numbers (3, rows, columns).
    pub fn pixels(&self, picture: &Picture) -> Result<Tensor> {
        let by_colour = |numbers: &[f32; 3]| Tensor::new(numbers, &Device::Cpu)?.reshape((3, 1, 1));
        let scaled = (&picture.0 * self.scale)?;
        scaled.broadcast_sub(&by_colour(&self.mean)?)?.broadcast_div(&by_colour(&self.std)?)
    }
}
