/* Layers and training from C: column- and row-parallel linear layers and 1x1 convolutions, embedding and
 * cross-entropy over a split vocabulary, losses of elements on the caller's memory, loss scaling and
 * conversions, casts to eight bits, a transformer by its configuration, its training step. C11; usable from
 * C++ too. The functions are in libweft_train: link it by weft_train.pc or the CMake target
 * weft::weft_train. This header includes weft/weft.h, whose conventions also hold here.
 *
 * A weft_compute holds the means by which a rank computes. Only one thread at a time may use it and the
 * objects that were made with it; ranks that are threads have one each. */
#ifndef WEFT_WEFT_TRAIN_H
#define WEFT_WEFT_TRAIN_H

#include "weft/c_train/compute.h"
#include "weft/c_train/conv.h"
#include "weft/c_train/experts.h"
#include "weft/c_train/float8.h"
#include "weft/c_train/linear.h"
#include "weft/c_train/loss.h"
#include "weft/c_train/loss_scaler.h"
#include "weft/c_train/model.h"
#include "weft/c_train/module.h"
#include "weft/c_train/trainer.h"
#include "weft/c_train/vocab.h"
#include "weft/weft.h"

#endif /* WEFT_WEFT_TRAIN_H */
